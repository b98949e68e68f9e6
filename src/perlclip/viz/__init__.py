"""What report, analysis and demonstration show things with: one style, one drawing, one set of pages."""
