"""Both halves of the wire. Client modules and server modules meet in `protocol` and nowhere else."""
