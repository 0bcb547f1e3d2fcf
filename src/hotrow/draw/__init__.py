"""Charts as SVG and pages of HTML; nothing here knows what a run is."""
