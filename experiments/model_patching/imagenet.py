"""ImageNet in the layout of torchvision's ImageFolder, as the loader of ``imagenet.yaml``.

    polymode compare --config experiments/model_patching/imagenet.yaml --set data.folder=/data/imagenet

The folder has ``train/`` and ``val/``, each with a subfolder a class. Images are read as they are needed, for
which it takes torchvision (``pip install torchvision``).
"""

from pathlib import Path

from torch.utils.data import DataLoader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load(folder: str, batch_size: int = 256, workers: int = 8) -> dict:
    """Training images cropped at random and resized to 224 pixels, test images cropped in the middle."""
    from torchvision import datasets, transforms  # type: ignore[import-not-found]  # optional

    ready = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    varied = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *ready]
    )
    middle = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *ready])

    def loader(part: str, transform: object, *, shuffle: bool) -> DataLoader:
        images = datasets.ImageFolder(Path(folder) / part, transform)
        return DataLoader(images, batch_size, shuffle=shuffle, num_workers=workers)

    return {
        "train": loader("train", varied, shuffle=True),
        "test": loader("val", middle, shuffle=False),
        "likelihood": "categorical",
        "model": "resnet18",
    }
