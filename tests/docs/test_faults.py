"""Every deliberate fault can be inserted; `python tests/faults.py` shows which test detects it."""

import pytest
from faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_text_to_replace_occurs_once(fault: Fault) -> None:
    assert (ROOT / "src" / "wsam" / fault.file).read_text().count(fault.old) == 1
