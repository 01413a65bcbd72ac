"""The part of an adapter that no engine owns: how a layer is stored, its pages, a step as prepared calls, and what runs before a request.

An adapter adds the engine's types, its bytes, and its metadata as ours. `docs/extending.md` shows one.
"""
