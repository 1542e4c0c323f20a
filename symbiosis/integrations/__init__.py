"""What sits beside `connection`: the demo, `top`, and callbacks of other tools."""
