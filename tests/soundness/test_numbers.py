"""Numbers that are read to be shown: a program that prints its loss is captured, and one that decides by it is not."""

import logging
import math

import pytest
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Shard
from graphguard.errors import GraphGuardError

LOG = logging.getLogger(__name__)
INPUTS = {"x": gg.Input((4, 8), Shard(0)), "w": gg.Input((8, 3))}


def loss_of(x, w):
    return (x @ w).pow(2).mean()


def summed(x, w):
    loss = loss_of(x, w)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss


def checked(tell):
    """With something that both programs do with the loss."""

    def sequential(x, w):
        return {"loss": tell(loss_of(x, w))}

    def distributed(x, w):
        return {"loss": tell(summed(x, w))}

    return gg.verify(sequential, distributed, mesh={"dp": 2}, inputs=INPUTS)


def printed(loss):
    print(f"loss {loss.item():.3f}")
    return loss


def printed_behind_a_condition(loss):
    # fmt: off
    if loss.dim() == 0: print("loss", loss.item())  # noqa: E701 # as scripts have it
    # fmt: on
    return loss


def logged(loss):
    LOG.warning("loss %s", loss.item())
    return loss


def smoothed(loss):
    running, seen = 0.0, []
    for _ in range(3):
        running = 0.9 * running + 0.1 * loss.item()
        seen.append(loss.item() / 2 - 1)
    print("loss", round(running, 3), sum(seen) / len(seen), -seen[0], abs(seen[1]))
    return loss


def of_a_number(loss):
    return loss * (1.0 if isinstance(loss.item(), float) else 2.0)


def written_over(loss):
    number = loss.item()
    loss.zero_()
    print(number)
    return loss


@pytest.mark.parametrize(
    "tell", [printed, printed_behind_a_condition, logged, smoothed, of_a_number, written_over], ids=lambda tell: tell.__name__
)
def test_a_number_that_is_shown_is_not_read(tell, capfd):
    report = checked(tell)
    assert report.verified
    assert any("nothing depends on the type of the number that the program reads at" in line for line in report.assumptions)
    if tell is printed:
        assert "loss ..." in capfd.readouterr().err


def test_a_program_that_prints_its_loss_and_forgets_the_sum_is_refuted():
    def sequential(x, w):
        return {"loss": printed(loss_of(x, w))}

    def distributed(x, w):
        return {"loss": printed(loss_of(x, w))}

    report = gg.verify(sequential, distributed, mesh={"dp": 2}, inputs=INPUTS, outputs={"loss": gg.Replicate()})
    assert report.verdict == "refuted"


def compares(loss):
    return loss * 2 if loss.item() > 1 else loss


def compares_with_itself(loss):
    return loss * 2 if loss.item() == loss.item() else loss


def compares_a_sum(loss):
    return loss * 2 if loss.item() + 1 > 1 else loss


def asks_for_truth(loss):
    return loss * 2 if loss.item() else loss


def rounds(loss):
    return loss * round(loss.item())


def multiplies(loss):
    return loss * loss.item()


def is_multiplied(loss):
    return loss.item() * loss


def fills(loss):
    return loss + torch.full((), loss.item())


def takes_the_root(loss):
    return loss * math.sqrt(loss.item())


def counts(loss):
    return loss * len({loss.item()})


def reads_text(loss):
    return loss * len(f"{loss.item()}")


def names_text(loss):
    print(text := f"{loss.item()}")
    return loss * len(text)


def keeps_text(loss):
    texts = []
    print(texts.append(f"{loss.item()}"))
    return loss * len(texts[0])


def names_text_of_a_tensor(loss):
    print(text := f"{loss}")
    return loss * len(text)


def is_whole(loss):
    return loss * 2 if loss.item().is_integer() else loss


def chooses(loss):
    return loss * max(loss.item(), 1.0)


@pytest.mark.parametrize(
    "tell",
    [
        compares, compares_with_itself, compares_a_sum, asks_for_truth, rounds, multiplies, is_multiplied, fills,
        takes_the_root, counts, reads_text, names_text, keeps_text, names_text_of_a_tensor, is_whole, chooses,
    ],
    ids=lambda tell: tell.__name__,
)  # fmt: skip
def test_a_number_that_decides_something_is_read(tell):
    with pytest.raises(GraphGuardError, match=r"the program reads a number|the program makes text of a tensor"):
        checked(tell)


def test_torch_makes_no_tensor_of_an_unread_number():
    with pytest.raises(GraphGuardError, match="Could not infer dtype of Unread"):
        checked(lambda loss: loss * torch.tensor([loss.item()])[0])
