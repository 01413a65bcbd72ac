"""Many queries: pages through a bounded 16-bit scratch to a dense attention kernel."""
