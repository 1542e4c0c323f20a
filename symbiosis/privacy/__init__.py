"""Masking, certificates, DP-SGD and the attacks that measure them."""
