"""What an engine's adapter is made of, whatever the engine: an adapter adds its types, its bytes, and its metadata as ours."""
