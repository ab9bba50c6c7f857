"""The style shared by pictures and pages."""
