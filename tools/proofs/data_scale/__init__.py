"""Parts of measure_data_scale.py: a large corpus that opens, begins and resumes."""
