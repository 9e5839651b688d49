"""The data package: sources, formats, templates and masks, the prepared dataset, packing, order, collation."""
