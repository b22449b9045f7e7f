"""What a training step costs beside other work: idle, then beside busy processes, with one and all threads.

python benchmarks/load.py [--busy 2]
"""

import argparse
import multiprocessing
import time

import torch

import polymode as pm


def step_milliseconds(threads: int | None, repeats: int = 3) -> tuple[float, int]:
    """Best time of a step of ECMP on a small CNN, and the threads it was trained with."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2000, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (2000,), generator=generator)
    data = pm.ArrayData(images, labels, batch_size=64)
    epochs, best, number = 6, float("inf"), 0
    for _ in range(repeats):
        posterior = pm.fit(
            pm.methods.ECMP(),
            lambda: pm.models.SmallCNN(10, in_channels=1, image_size=8),
            data,
            likelihood="categorical",
            epochs=epochs,
            threads=threads,
        )
        best = min(best, 1000 * posterior.record["training_seconds"] / (epochs * -(-2000 // 64)))
        number = posterior.record["threads"]
    return best, number


def busy() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside the training")
    count = parser.parse_args().busy
    ways = {
        "as measured": None,
        "one thread": 1,
        f"{torch.get_num_threads()} threads": torch.get_num_threads(),
    }
    idle = {name: step_milliseconds(threads) for name, threads in ways.items()}
    others = [multiprocessing.Process(target=busy, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    time.sleep(1)
    loaded = {name: step_milliseconds(threads) for name, threads in ways.items()}
    for other in others:
        other.kill()
    print(f"{'threads':<14}{'idle, ms':>10}{f'beside {count}, ms':>16}{'ratio':>8}")
    for name in ways:
        before, after = idle[name][0], loaded[name][0]
        shown = f"{name} ({loaded[name][1]})" if ways[name] is None else name
        print(f"{shown:<14}{before:>10.2f}{after:>16.2f}{after / before:>8.2f}")


if __name__ == "__main__":
    main()
