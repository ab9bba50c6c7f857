"""The style shared by plots and pages."""
