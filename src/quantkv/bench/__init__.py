"""Every implementation and every rival side by side in one run, each checked before it is timed: `quantkv bench`."""
