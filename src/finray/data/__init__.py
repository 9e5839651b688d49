"""The data room: sources, formats, templates and masks, the prepared dataset, packing, order, collation."""
