"""The version of the distribution, written in this one place; the build and the handshake read it here."""

__version__ = "0.1.0"
