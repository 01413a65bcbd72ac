"""Everything public called with anything: the answer of an oracle made from the documents, or an exception that names the cause."""
