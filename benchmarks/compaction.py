"""Time a compact ResNet-20 beside the whole one and beside one that was written by hand in the same shapes.

    python benchmarks/compaction.py                 # half of the channels, batches of 128, about a minute
    python benchmarks/compaction.py --rate 0.75     # another share of channels that are taken out

Contenders run in turn, and each one's best time counts. The network by hand has the convolutions and
BatchNorms of the compact one; on the residual stream it adds channels into their places. It keeps no
constants, so its outputs are other ones: it is what the shapes cost.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polymode as pm
from polymode.networks.compaction import PRUNABLE


class HandBlock(nn.Module):
    """conv–BN–ReLU–conv–BN, added into some channels of the input, then ReLU."""

    def __init__(self, small: nn.Module, places: Tensor, width: int, shortcut_places: Tensor | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_like(small.conv1), nn.BatchNorm2d(small.conv1.out_channels)
        self.conv2, self.bn2 = conv_like(small.conv2), nn.BatchNorm2d(small.conv2.out_channels)
        self.places, self.shortcut_places, self.width = places, shortcut_places, width
        if shortcut_places is not None:
            self.shortcut = conv_like(small.downsample[0])
            self.shortcut_bn = nn.BatchNorm2d(small.downsample[0].out_channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.shortcut_places is not None:
            x = scattered(self.shortcut_bn(self.shortcut(x)), self.shortcut_places, self.width)
        return F.relu(x.index_add(1, self.places, out))


class HandNet(nn.Module):
    """The shapes of a compact ResNet in plain layers."""

    def __init__(self, small: nn.Module, masks: dict[str, Tensor]) -> None:
        super().__init__()
        self.conv, self.bn = conv_like(small.conv), nn.BatchNorm2d(small.conv.out_channels)
        per_stack, blocks = len(small.blocks) // 3, []
        for stack in range(3):
            numbers = range(stack * per_stack, (stack + 1) * per_stack)
            first = "conv.weight" if stack == 0 else f"blocks.{numbers[0]}.downsample.0.weight"
            union = masks[first].clone()
            for number in numbers:
                union |= masks[f"blocks.{number}.conv2.weight"]
            if stack == 0:
                self.places, self.width = places_in(union, masks[first]), int(union.sum())
            for number in numbers:
                own = places_in(union, masks[f"blocks.{number}.conv2.weight"])
                shortcut = places_in(union, masks[first]) if stack and number == numbers[0] else None
                blocks.append(HandBlock(small.blocks[number], own, int(union.sum()), shortcut))
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(small.classifier.in_features, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(scattered(self.bn(self.conv(x)), self.places, self.width))
        return self.classifier(self.blocks(x).mean((-2, -1)))


def conv_like(layer: nn.Module) -> nn.Conv2d:
    return nn.Conv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, bias=False
    )


def places_in(union: Tensor, mask: Tensor) -> Tensor:
    return mask[union].nonzero()[:, 0]


def scattered(x: Tensor, places: Tensor, width: int) -> Tensor:
    wide = torch.zeros(len(x), width, *x.shape[2:]).to(memory_format=torch.channels_last)
    return wide.index_add(1, places, x)


def multiplications(module: nn.Module, inputs: Tensor) -> int:
    """Of convolutions and linear layers, for one example."""
    counts: list[int] = []

    def note(layer: nn.Module, _: tuple, outputs: Tensor) -> None:
        each = layer.weight[0].numel() * len(layer.weight)
        counts.append(each * outputs[0, 0].numel() if outputs.ndim == 4 else each)

    hooks = [p.register_forward_hook(note) for p in module.modules() if isinstance(p, PRUNABLE)]
    with torch.no_grad():
        module(inputs[:1])
    for hook in hooks:
        hook.remove()
    return sum(counts)


def best_times(contenders: dict[str, nn.Module], inputs: Tensor, repeats: int) -> dict[str, float]:
    times = dict.fromkeys(contenders, float("inf"))
    with torch.inference_mode():
        for _ in range(repeats):
            for name, module in contenders.items():
                begin = time.perf_counter()
                module(inputs)
                times[name] = min(times[name], time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=0.5, help="share of channels that are taken out")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    module = pm.models.resnet20().to(memory_format=torch.channels_last).eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.uniform_(-1, 1, generator=generator)
            nn.init.uniform_(part.bias, -1, 1, generator=generator)
    masks = {
        f"{name}.weight": torch.rand(len(part.weight), generator=generator).index_fill(0, torch.tensor(0), 1)
        >= options.rate  # one at least is kept
        for name, part in module.named_modules()
        if isinstance(part, nn.Conv2d)
    }
    small = pm.compact(module, masks).module
    by_hand = HandNet(small, masks).to(memory_format=torch.channels_last).eval()
    inputs = torch.randn(options.batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    contenders = {"whole": module, "by hand": by_hand, "compact": small}
    counts = {name: multiplications(each, inputs) for name, each in contenders.items()}
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        torch.set_num_threads(threads)
        times = best_times(contenders, inputs, options.repeats)
        print(f"{threads} thread{'s' if threads > 1 else ''}, batches of {options.batch}")
        for name, seconds in times.items():
            print(
                f"  {name:8} {1e3 * seconds:8.1f} ms   {seconds / times['compact']:5.2f} of compact   "
                f"multiplications {counts[name] / counts['whole']:.2f} of whole"
            )


if __name__ == "__main__":
    main()
