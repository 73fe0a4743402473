"""Programs that differentiate and update: gradients, optimizers, checkpointing, functional transforms, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import assert_replays_as_eager, capture_one, filled, flat, named, random_inputs
from torch.utils.checkpoint import checkpoint

from graphguard import Input
from graphguard.api import train_step
from graphguard.capture.torch.program import ModelProgram
from graphguard.capture.torch.session import capture_sequential
from graphguard.errors import CaptureError
from graphguard.oracle.replay import replay

X = {"x": Input((4, 6))}
MLP = {"x": Input((8, 6)), "a": Input((6, 5)), "b": Input((5, 3))}
WEIGHTS = X | {"w": Input((6 * 5 + 5 + 5 * 3 + 3,))}


def leaves(*tensors):
    return [tensor.requires_grad_() for tensor in tensors]


def net(w):
    return filled(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)), w)


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


# ---------------------------------------------------------------------- gradients
def by_grad(x, a, b):
    leaves(x, a, b)
    return torch.autograd.grad((torch.relu(x @ a) @ b).square().sum(), (x, a, b))


def by_backward(x, a, b):
    leaves(a, b)
    loss = (torch.tanh(x @ a) @ b).softmax(-1).log().mean()
    loss.backward()
    return loss.detach(), a.grad, b.grad, x.grad


def by_given_gradient(x, a, b):
    leaves(x, a)
    y, z = x @ a, x.exp()
    torch.autograd.backward([y, z], [y.detach() * 2, torch.ones_like(z)])
    return x.grad, a.grad, torch.autograd.grad(x.sin(), x, torch.ones_like(x), allow_unused=True)[0]


def twice(x, a, b):
    leaves(x, a)
    (slope,) = torch.autograd.grad((x @ a).tanh().sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), (x, a))


def accumulated(x, a, b):
    leaves(a, b)
    for part in x.chunk(4):
        ((torch.tanh(part @ a) @ b).square().mean() / 4).backward()
    return a.grad, b.grad


def of_shared_leaves(x, a, b):
    leaves(a)
    y = x @ a
    y = y + (x @ a.detach()) * y
    a_view = a[:, :2].t()
    (y.sum() + a_view.exp().sum()).backward()
    return a.grad


def through_views_and_writes(x, a, b):
    leaves(a)
    y = a * 2
    y[0] = x[0, :5]
    y[:, 1].mul_(3)
    y.t()[2].exp_()
    (y @ b).sum().backward()
    return a.grad


def with_hooks(x, a, b):
    leaves(a)
    a.register_hook(lambda g: g * 2)
    seen = []
    a.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y = x @ a
    y.register_hook(lambda g: g.clamp(max=0.5))
    y.retain_grad()
    y.square().sum().backward()
    return a.grad, seen[0], y.grad


def cleared(x, a, b):
    leaves(a)
    (x @ a).sum().backward()
    a.grad.zero_()
    (x @ a).square().sum().backward()
    first, a.grad = a.grad, None
    (x @ a).mean().backward()
    return first, a.grad


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x * x * g * ctx.scale, None


class AddInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        x.add_(y)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, g * 2


def by_custom_functions(x, a, b):
    leaves(x, a)
    y = AddInto.apply(x @ a, Cube.apply(a[:1], 2.0).expand(8, 5))
    return torch.autograd.grad(y.square().sum(), (x, a))


def of_many_operators(x, a, b):
    leaves(x, a, b)
    h = F.layer_norm(x @ a, (5,)) @ b
    h = F.group_norm(h[..., None].expand(8, 3, 4), 3).cumsum(-1).amax(-1)
    h = F.rms_norm(h, (3,)).masked_fill(h < 0, 0.1) + F.gelu(h) * F.dropout(h, 0.0)
    q = h.view(2, 4, 3).transpose(0, 1)
    h = F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(8, 3)
    loss = F.cross_entropy(h, torch.arange(8) % 3, label_smoothing=0.1, ignore_index=1) + h.std() + h.sort(0).values[0].prod()
    return loss, torch.autograd.grad(loss, (x, a, b))


def of_complex_rope(x, a, b):
    leaves(x)
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01]))
    turned = torch.view_as_real(torch.view_as_complex(x.view(8, 3, 2)) * torch.polar(torch.ones(8, 3), angles)).flatten(1)
    return torch.autograd.grad((turned @ a).square().sum(), x)


def of_batch_norm_in_evaluation(x, a, b):
    leaves(x)
    y = F.batch_norm(x, torch.zeros(6), torch.ones(6) * 2, a[:, 0], a[:, 1])
    return y, torch.autograd.grad(y.square().sum(), x)


def of_batch_norm_in_training(x, a, b):
    norm = torch.nn.BatchNorm1d(6)
    y = norm(norm(leaves(x)[0]))
    return y, norm.running_mean, norm.running_var, norm.num_batches_tracked, torch.autograd.grad(y.square().sum(), x)


def of_conv_and_embedding(x, a, b):
    leaves(a, b)
    y = F.conv1d(x[:, None], a[:, None, :3])
    e = F.embedding(torch.tensor([[0, 1, 1], [4, 2, 0]]), b, padding_idx=1)
    (y.square().mean() + e.exp().sum() + F.max_pool1d(y, 2).sum()).backward()
    return a.grad, b.grad


GRADIENTS = [by_grad, by_backward, by_given_gradient, twice, accumulated, of_shared_leaves, through_views_and_writes,
             with_hooks, cleared, by_custom_functions, of_many_operators, of_complex_rope, of_batch_norm_in_evaluation,
             of_batch_norm_in_training, of_conv_and_embedding]  # fmt: skip


@pytest.mark.parametrize("function", GRADIENTS)
def test_gradients_replay_as_eager(function):
    graph = assert_replays_as_eager(function, MLP)
    assert any(node.backward for node in graph.nodes)


# ---------------------------------------------------------------------- torch.func
def functional(x, a, b):
    def loss(a, b):
        return (torch.tanh(x @ a) @ b).square().sum()

    return torch.func.grad(loss, argnums=(0, 1))(a, b)


def vectorised(x, a, b):
    return torch.func.vmap(lambda row: (row @ a).sin() @ b)(x)


def per_sample(x, a, b):
    return torch.func.vmap(torch.func.grad(lambda w, row: (row @ w).square().sum()), in_dims=(None, 0))(a, x)


def asks_for_the_device(x, a, b):
    return torch.func.vmap(lambda row: row.new_ones(6).to(row.device) * row if row.is_cpu else row)(x)


def forward_mode(x, a, b):
    return torch.func.jvp(lambda w: (x @ w).tanh(), (a,), (torch.ones_like(a),))


def jacobian(x, a, b):
    return torch.func.jacrev(lambda row: (row @ a).tanh())(x[0]), torch.func.hessian(lambda row: (row @ a).sin().sum())(x[0])


@pytest.mark.parametrize("function", [functional, vectorised, per_sample, asks_for_the_device, forward_mode, jacobian])
def test_function_transforms_replay_as_eager(function):
    assert_replays_as_eager(function, MLP)


def test_what_attention_makes_is_where_its_operands_are():
    """Its mask is made by torch, on the device without data that torch knows of."""

    def function(x, a, b):
        q = x.view(1, 2, 4, 6)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert y.device.type == "cpu" and torch.empty(2, device="meta").device.type == "meta"
        with torch.autocast(device_type=y.device.type, enabled=False):
            return x * 2

    assert_replays_as_eager(function, MLP)


def test_functional_call_replays_as_eager():
    def function(x, w, b):
        module = torch.nn.Linear(6, 5)
        return torch.func.functional_call(module, {"weight": w, "bias": b}, (x,))

    graph = assert_replays_as_eager(function, X | {"w": Input((5, 6)), "b": Input((5,))})
    assert [node.op for node in graph.nodes] == ["aten.t.default", "aten.addmm.default"]


# ---------------------------------------------------------------------- clipping and optimizers
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clipping_replays_as_eager(foreach, norm):
    def function(x, w):
        module = net(w)
        module(x).square().sum().backward()
        total = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm, foreach=foreach)
        clipped = [p.grad.clone() for p in module.parameters()]
        torch.nn.utils.clip_grad_value_(module.parameters(), 0.01, foreach=foreach)
        return total, clipped, [p.grad for p in module.parameters()]

    assert_replays_as_eager(function, WEIGHTS)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.02}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "adamw, tensor rate": (torch.optim.AdamW, {"lr": 0.1, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
}


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_replay_as_eager_over_several_steps(name, foreach):
    make, options = OPTIMIZERS[name]

    def function(x, w):
        module = net(w)
        optimizer = make(module.parameters(), foreach=foreach, **options)
        for step in range(3):
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return parameters(module)

    assert_replays_as_eager(function, WEIGHTS)


def test_a_schedule_and_an_average_replay_as_eager():
    def function(x, w):
        module = net(w)
        average = copy.deepcopy(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).sum().backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), module.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return parameters(module), parameters(average)

    assert_replays_as_eager(function, WEIGHTS)


def test_parameters_that_are_slices_of_one_flat_tensor_train_as_eager():
    def function(x, w):
        module = net(w)
        flat, start = torch.empty_like(w), 0
        for p in module.parameters():
            part = flat[start : start + p.numel()].view(p.shape)
            part.copy_(p.data)
            p.data = part
            start += p.numel()
        for _ in range(2):
            for p in module.parameters():
                p.grad = None
            module(x).square().mean().backward()
            gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
            flat.sub_(0.1 * gradient)
        return flat, parameters(module), module(x)

    assert_replays_as_eager(function, WEIGHTS)


# ---------------------------------------------------------------------- checkpointing and modules
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_replays_as_eager(reentrant):
    def function(x, a, b):
        leaves(a, b)
        block = lambda h, w: F.dropout(torch.tanh(h @ w), 0.0)
        y = checkpoint(block, checkpoint(block, x.requires_grad_(), a, use_reentrant=reentrant), b, use_reentrant=reentrant)
        y.square().sum().backward()
        return y, a.grad, b.grad, x.grad

    graph = assert_replays_as_eager(function, MLP)
    assert sum(node.op == "aten.tanh.default" for node in graph.nodes) > 2


def test_train_step_gives_the_loss_and_every_gradient():
    step = train_step(lambda model, x: model(x).square().mean())
    program = ModelProgram(
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)), step, "sequential"
    )
    graph = capture_sequential(program, X)
    names = [f"{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    assert list(graph.inputs) == ["x", *(f"params.{name}" for name in names)]
    assert list(graph.outputs) == ["loss", *(f"grads.{name}" for name in names)]
    given = {name: torch.randn(value.shape) for name, value in graph.inputs.items()}
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    module.load_state_dict({name: given[f"params.{name}"] for name in names})
    want = step(module, x=given["x"])
    got = replay(graph, given)
    assert torch.equal(got["loss"], want["loss"])
    assert all(torch.equal(got[f"grads.{name}"], want["grads"][name]) for name in names)
    assert not any("uniform" in node.op for node in graph.nodes), "the initialisation is not part of the step"


def test_tied_parameters_have_one_gradient():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(torch.arange(4))) * x

    graph = capture_sequential(ModelProgram(Tied, train_step(lambda m, x: m(x).sum()), "sequential"), X)
    assert list(graph.inputs) == ["x", "params.embed.weight"]
    given = random_inputs(X) | {"params.embed.weight": torch.randn(6, 4)}
    w = given["params.embed.weight"].clone().requires_grad_()
    ((w[:4] @ w.T) * given["x"]).sum().backward()
    torch.testing.assert_close(replay(graph, given)["grads.embed.weight"], w.grad)


def test_an_optimizer_that_reads_its_step_count_is_captured():
    graph = capture_one(lambda x: _adam_by_hand(x), X)
    assert not any(node.op.startswith("aten._local_scalar") for node in graph.nodes)


def _adam_by_hand(x):
    step, m = torch.tensor(0.0), torch.zeros_like(x)
    for _ in range(3):
        step += 1
        m.lerp_(x, 0.1)
        m = m / (1 - 0.9 ** step.item())
    return m


# ---------------------------------------------------------------------- random numbers
def recomputed_dropout(reentrant):
    def function(x, a, b):
        leaves(a, b)
        block = lambda h, w: F.dropout(torch.tanh(F.dropout(h, 0.5) @ w), 0.3)
        y = checkpoint(block, x.requires_grad_(), a, use_reentrant=reentrant)
        y = F.dropout(checkpoint(block, y, b, use_reentrant=reentrant), 0.2)
        y.square().sum().backward()
        return y, a.grad, b.grad, x.grad, torch.rand(2)

    return function


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_that_is_computed_again_has_the_same_mask(reentrant):
    graph = assert_replays_as_eager(recomputed_dropout(reentrant), MLP)
    assert sum(node.op == "aten.bernoulli_.float" for node in graph.nodes) == 5, "two per block, and one"


def seeded_twice(x):
    torch.manual_seed(3)
    first, second = torch.rand(4, 6), torch.randn(4, 6)
    torch.manual_seed(3)
    again, other = torch.rand(4, 6), torch.rand(4, 6)
    return x * first, x * second, x * again, x * other


def forked(x):
    with torch.random.fork_rng(devices=[]):
        inside = torch.rand_like(x)
    return inside, torch.rand_like(x), torch.rand_like(x)


def restored(x):
    state = torch.get_rng_state()
    first = torch.empty(4, 6).normal_()
    torch.set_rng_state(state)
    return first, torch.zeros(4, 6).normal_(), torch.empty(4, 6).normal_()


@pytest.mark.parametrize(
    ("function", "draws", "equal"), [(seeded_twice, 3, ("0", "2")), (forked, 2, ("0", "1")), (restored, 2, ("0", "1"))]
)
def test_a_generator_in_the_same_state_gives_the_same_numbers(function, draws, equal):
    graph, given = capture_one(function, X), random_inputs(X)
    random = [node for node in graph.nodes if any(word in node.op for word in ("rand", "normal"))]
    got, eager = replay(graph, given), flat(function(**given))
    assert len(random) == draws
    for outputs in (got, eager):
        pairs = [(a, b) for a in outputs for b in outputs if a < b and torch.equal(outputs[a], outputs[b])]
        assert pairs == [equal]


def test_forked_random_numbers_replay_as_eager():
    assert_replays_as_eager(forked, X)


def test_drawing_again_with_other_tensors_is_refused():
    def function(x):
        state = torch.get_rng_state()
        first = torch.bernoulli(x.sigmoid())
        torch.set_rng_state(state)
        return first + torch.bernoulli(x.tanh().abs())

    with pytest.raises(CaptureError, match=r"aten\.bernoulli\.default draws the random numbers of an earlier call again"):
        capture_one(function, X)


def of_two_generators(x):
    return [torch.randn(4, 6, generator=torch.Generator().manual_seed(3)) for _ in range(2)]


def of_one_generator(x):
    generator = torch.Generator()
    first = torch.randn(4, 6, generator=generator.manual_seed(3))
    return first, torch.empty(4, 6).normal_(generator=generator), torch.randn(4, 6, generator=generator.manual_seed(3))


def of_a_saved_generator(x):
    generator = torch.Generator()
    state = generator.get_state()
    first = torch.randperm(24, generator=generator)
    generator.set_state(state)
    return first, torch.randperm(24, generator=generator), torch.randperm(24, generator=generator)


def of_the_default_generator(x):
    torch.default_generator.manual_seed(3)
    first = torch.rand(4, 6)
    torch.default_generator.manual_seed(3)
    return first, torch.rand(4, 6, generator=torch.default_generator), torch.rand_like(x)


def seeded_as_before(x):
    torch.manual_seed(3)
    first = torch.rand(4, 6)
    return first, torch.rand(4, 6), torch.full((), torch.initial_seed())


def like_another(x):
    torch.manual_seed(3)
    first = torch.randn(4, 6)
    torch.manual_seed(3)
    return first, torch.randn_like(x), torch.randn_like(x)


STATE = torch.Generator().manual_seed(5).get_state()


def of_a_state_from_outside(x):
    first = torch.rand(4, 6, generator=torch.Generator().manual_seed(5))
    torch.set_rng_state(STATE)
    return first, torch.rand(4, 6)


@named(of_two_generators, of_one_generator, of_a_saved_generator, of_the_default_generator, seeded_as_before, like_another,
       of_a_state_from_outside)  # fmt: skip
def test_generators_give_equal_numbers_where_they_do_in_torch(program):
    graph = capture_one(program, X)
    got, eager = replay(graph, random_inputs(X)), flat(program(**random_inputs(X)))
    same = [
        {(a, b) for a in outputs for b in outputs if a < b and torch.equal(outputs[a], outputs[b])} for outputs in (got, eager)
    ]
    assert same[0] == same[1]
    assert graph.assumptions == ()


def test_different_calls_from_one_state_are_an_assumption():
    def function(x):
        torch.manual_seed(3)
        first = torch.randn(4, 6)
        torch.manual_seed(3)
        return first, torch.empty(4, 6).normal_()

    assert any("random numbers of different calls are unrelated" in text for text in capture_one(function, X).assumptions)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers_replay_as_eager(name):
    def function(x, w):
        w = torch.nn.Parameter(w)
        optimizer = getattr(torch.optim, name)([w], lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            (x @ w).square().mean().backward()
            optimizer.step()
        return w

    assert_replays_as_eager(function, {**X, "w": Input((6, 3))})


def test_batch_norm_of_an_input_without_gradient_replays_as_eager():
    def function(x):
        norm = torch.nn.BatchNorm1d(6)
        norm(x).square().sum().backward()
        norm.eval()(x).exp().sum().backward()
        return norm.weight.grad, norm.bias.grad

    assert_replays_as_eager(function, X)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_replay_as_eager(mode):
    def function(ids, w):
        w.requires_grad_()
        bags = torch.nn.functional.embedding_bag(ids, w, torch.tensor([0, 3, 3, 7]), mode=mode, padding_idx=1)
        rows = torch.nn.functional.embedding_bag(ids.view(3, 4), w, mode=mode)
        return bags, rows, torch.autograd.grad(bags.square().sum() + rows.exp().sum(), w)

    assert_replays_as_eager(function, {"ids": Input((12,), dtype=torch.int64), "w": Input((8, 6))})


def test_distributions_are_sampled_without_looking_at_their_parameters():
    def function(x):
        normal, choice = torch.distributions.Normal(x, x.exp()), torch.distributions.Categorical(logits=x)
        sample, index = normal.rsample(), choice.sample()
        return sample, normal.log_prob(sample), index, choice.log_prob(index), choice.entropy()

    assert_replays_as_eager(function, X)


def test_spectral_norm_replays_as_eager():
    def function(x):
        layer = torch.nn.Linear(6, 3)
        torch.nn.init.constant_(layer.bias, 0.5)
        layer.weight.data.copy_(torch.linspace(-1, 1, 18).view(3, 6))
        layer = torch.nn.utils.parametrizations.spectral_norm(layer)
        layer(x).square().sum().backward()
        return layer(x), layer.parametrizations.weight.original.grad

    assert_replays_as_eager(function, X)
