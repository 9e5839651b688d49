"""What people look at: results that show themselves, and pages for a browser with plots that can be zoomed."""
