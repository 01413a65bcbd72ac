"""What configurations of kernels that write rows have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import WriteConfig


class OfRows:
    """A configuration whose kernel has the blocks of its `rows`, a `WriteConfig`, and whose codecs are those of the rows."""

    rows: WriteConfig

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows.threads

    @property
    def tokens_of_block(self) -> int:
        """Tokens whose rows a block writes."""
        return self.rows.tokens_of_block

    def cubin(self) -> bytes:
        """Compiled, once."""
        return self.rows.compiled(self)
