"""Everything public called with anything: the answer of an oracle made from the documents, or an exception that names the cause.

A target is a module with `cases()`, a hypothesis strategy of calls in plain data, and `check(case)`, which raises where the answer is
wrong. SHARE: of all cases."""

from . import attention, command, files, names, refusals, rows, tables

TARGETS = {
    "attention": attention,
    "rows": rows,
    "refusals": refusals,
    "vllm names": names,
    "page table": tables,
    "files": files,
    "command line": command,
}
