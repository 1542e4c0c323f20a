"""What sits beside `connection`: the demo, and later the verbs and callbacks of other tools."""
