"""Arrow, as datasets.save_to_disk writes it; each row is a record."""

from harness.files.arrow_rows import count_rows, records_of, why_no_pyarrow
from harness.files.data_format import DataFormat

FORMAT = DataFormat(
    name="arrow",
    suffixes=frozenset({".arrow", ".feather"}),
    records=records_of,
    count=count_rows,
    why_not=lambda file, is_named: why_no_pyarrow(),
)
