"""What the host does for all kernels: compiles, loads and launches them, and lays out what they read."""
