"""Torch's own samples of its operators, in several dtypes and mixtures of them: each description against execution.

Here a slice; `python -m graphguard.audit.operators` takes all of them.
"""

import pytest
import torch

from graphguard.audit import operators
from graphguard.audit.calls import OperatorCall, examined
from graphguard.lemmas import known, registry

EVERY, PORTIONS = 24, 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("portion", range(PORTIONS))
def test_operators_give_what_they_are_described_as(portion):
    torch.set_num_threads(1)
    found = operators.Found()
    for info in operators.infos()[portion * EVERY // PORTIONS :: EVERY]:
        found.add(operators.examine_apart(info, seed=portion))
    assert found.wrong == []
    assert found.compared > 500


@pytest.mark.parametrize("call", [
    OperatorCall("aten.threshold.default", (torch.tensor([-5, -4, -3]), -4.1, -5.4)),  # both numbers are cut off
    OperatorCall("aten.gather.default", (torch.ones(5), 0, torch.zeros(2, 0, dtype=torch.int64))),  # of other dims
    OperatorCall("aten.nll_loss_forward.default", (torch.tensor([-1.0, -2.0]), torch.tensor(1), None, 0, -100)),  # one sample
], ids=str)  # fmt: skip
def test_calls_that_were_described_wrongly(call):
    assert not examined(call).wrong


@pytest.mark.filterwarnings("ignore")
def test_a_row_that_is_wrong_in_one_dtype_is_found(monkeypatch):
    known.rows()
    wrong = registry.Row(
        "aten.sign.default", "arithmetic", "x, of bytes", "", lambda c, x: x if c.is_whole(0) else c.fn("sign", x)
    )
    monkeypatch.setitem(registry.ROWS, "aten.sign.default", wrong)
    (info,) = (info for info in operators.infos() if info.name == "sign")
    found = operators.examine(info)
    assert found.wrong and all(text.startswith("aten.sign.default ") for text in found.wrong)
    assert not any(text.startswith("aten.sign.default f>f") for text in found.wrong)


def test_a_call_is_compared_opaque_or_wrong():
    byte = torch.tensor([200, 100], dtype=torch.uint8)
    assert examined(OperatorCall("aten.add.Tensor", (byte.long(), byte.long()))).wrong == ""
    assert examined(OperatorCall("aten.add.Tensor", (byte, byte))).wrong is None  # opaque
    with known.unguarded():
        found = examined(OperatorCall("aten.add.Tensor", (byte, byte)))
    assert (found.row, found.signature) == ("aten.add.Tensor", "n>n")
    assert found.wrong == "144 at [0] is described as 400"
    assert examined(OperatorCall("aten.mm.default", (byte, byte))) is None  # torch does not take it


def test_a_process_that_a_kernel_ends_is_no_fault(monkeypatch):
    monkeypatch.setattr(operators, "examine", lambda info, seed: operators.os._exit(8))
    assert operators.examine_apart(None) == operators.Found()
