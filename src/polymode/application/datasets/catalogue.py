"""The catalogue of data sets: what each is and where it comes from; and tasks from names and paths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polymode.application.datasets import characters, cifar10_shifted, embedded, images, imdb, medmnist, uci
from polymode.application.datasets.downloads import Download, extract
from polymode.data.task import Task

FileProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Expected:
    """What is known of a data set's content; only what is given is checked.

    channel_means: of raw training pixels. first_train, first_test: the first labels. target: mean and
    standard deviation of the raw targets of all rows. text: how the first training text starts.
    """

    num_train: int
    num_test: int
    num_splits: int = 1
    train_counts: tuple[int, ...] = ()
    test_counts: tuple[int, ...] = ()
    channel_means: tuple[float, ...] = ()
    first_train: tuple[int, ...] = ()
    first_test: tuple[int, ...] = ()
    num_features: int | None = None
    target: tuple[float, float] | None = None
    text: str = ""


@dataclass(frozen=True)
class DataSet:
    """A data set by name.

    load: makes the task; given the data folder where it has a parameter ``folder``. downloads: official
    files. after: what to do in the data folder once they are there. files: what must be in the data folder
    for ``load``. facts: what a reader wants to know. expected: what ``check_data`` compares with.
    """

    name: str
    summary: str
    load: Callable[..., Task]
    expected: Expected
    downloads: tuple[Download, ...] = ()
    after: Callable[[Path], None] | None = None
    files: tuple[str, ...] = ()
    facts: str = ""


def _embedded(name: str, summary: str, load: Callable[..., Task], expected: Expected, facts: str) -> DataSet:
    return DataSet(name, summary, load, expected, facts=facts)


def _uci(name: str, summary: str, expected: Expected) -> DataSet:
    num_rows = expected.num_train + expected.num_test
    return DataSet(
        f"uci-{name}",
        summary,
        partial(uci.uci, name=name),
        expected,
        downloads=uci.downloads(name),
        files=tuple(download.file for download in uci.downloads(name)),
        facts=f"{num_rows} rows, {expected.num_features} features; {expected.num_splits} standard and "
        f"{expected.num_features} gap splits",
    )


def _extract_all(archives: Sequence[Download], folder: Path) -> None:
    for archive in archives:
        extract(folder / archive.file, folder)


def _convert_imdb(folder: Path) -> None:
    imdb.convert_archive(folder / imdb.DOWNLOADS[0].file, folder)


_MNIST_TRAIN = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
_MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
_SVHN_TRAIN = (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659)
_SVHN_TEST = (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595)

_SETS = (
    _embedded(
        "digits",
        "handwritten digits 0 to 7; 8 and 9 are foreign",
        embedded.digits,
        Expected(350, 1093),
        "1,443 images of 8×8 pixels, 8 classes; from scikit-learn",
    ),
    _embedded(
        "two_moons",
        "two interleaved half circles with noise",
        embedded.two_moons,
        Expected(300, 1000, train_counts=(150, 150), test_counts=(500, 500), num_features=2),
        "points in the plane, 2 classes; made from a formula",
    ),
    _embedded(
        "gap_regression",
        "a curve with noise and a gap without data",
        embedded.gap_regression,
        Expected(100, 1000, num_features=1),
        "one feature; made from a formula",
    ),
    _embedded(
        "breast_cancer",
        "tumours, malignant or benign",
        embedded.breast_cancer,
        Expected(455, 114, num_features=30),
        "569 rows, 30 features, 2 classes; from scikit-learn",
    ),
    _embedded(
        "diabetes",
        "progression of diabetes after one year",
        embedded.diabetes,
        Expected(354, 88, num_features=10, target=(152.1, 77.01)),
        "442 rows, 10 features; from scikit-learn",
    ),
    DataSet(
        "cifar10",
        "photographs of ten kinds of things",
        images.cifar10,
        Expected(
            50000,
            10000,
            train_counts=(5000,) * 10,
            test_counts=(1000,) * 10,
            channel_means=(0.4914, 0.4822, 0.4465),
            first_train=(6, 9, 9, 4, 1),
            first_test=(3, 8, 8, 0, 6),
        ),
        images.CIFAR10_DOWNLOADS,
        partial(_extract_all, images.CIFAR10_DOWNLOADS),
        images.CIFAR10_FILES,
        "60,000 colour images of 32×32 pixels, 10 classes; 170 MB to download",
    ),
    DataSet(
        "cifar10_shifted",
        "cifar10, tested on corrupted photographs too",
        cifar10_shifted.cifar10_shifted,
        Expected(
            50000,
            50000,
            train_counts=(5000,) * 10,
            test_counts=(5000,) * 10,
            channel_means=(0.4914, 0.4822, 0.4465),
            first_train=(6, 9, 9, 4, 1),
            first_test=(3, 8, 8, 0, 6),
        ),
        cifar10_shifted.DOWNLOADS,
        partial(_extract_all, cifar10_shifted.DOWNLOADS),
        cifar10_shifted.FILES,
        "CIFAR-10 and four corruptions of its test images (CIFAR-10-C); 3.1 GB to download",
    ),
    DataSet(
        "cifar100",
        "photographs of a hundred kinds of things",
        images.cifar100,
        Expected(
            50000,
            10000,
            train_counts=(500,) * 100,
            test_counts=(100,) * 100,
            channel_means=(0.5071, 0.4866, 0.4409),
            first_train=(19, 29, 0, 11, 1),
            first_test=(49, 33, 72, 51, 71),
        ),
        images.CIFAR100_DOWNLOADS,
        partial(_extract_all, images.CIFAR100_DOWNLOADS),
        images.CIFAR100_FILES,
        "60,000 colour images of 32×32 pixels, 100 classes; 169 MB to download",
    ),
    DataSet(
        "mnist",
        "handwritten digits",
        images.mnist,
        Expected(
            60000,
            10000,
            train_counts=_MNIST_TRAIN,
            test_counts=_MNIST_TEST,
            channel_means=(0.1307,),
            first_train=(5, 0, 4, 1, 9),
            first_test=(7, 2, 1, 0, 4),
        ),
        images.MNIST_DOWNLOADS,
        files=tuple(download.file for download in images.MNIST_DOWNLOADS),
        facts="70,000 grey images of 28×28 pixels, 10 classes; 12 MB to download",
    ),
    DataSet(
        "fashion_mnist",
        "pieces of clothing",
        images.fashion_mnist,
        Expected(
            60000,
            10000,
            train_counts=(6000,) * 10,
            test_counts=(1000,) * 10,
            channel_means=(0.2860,),
            first_train=(9, 0, 0, 3, 0),
            first_test=(9, 2, 1, 1, 6),
        ),
        images.FASHION_MNIST_DOWNLOADS,
        files=tuple(download.file for download in images.FASHION_MNIST_DOWNLOADS),
        facts="70,000 grey images of 28×28 pixels, 10 classes; 31 MB to download",
    ),
    DataSet(
        "svhn",
        "digits of house numbers",
        images.svhn,
        Expected(
            73257,
            26032,
            train_counts=_SVHN_TRAIN,
            test_counts=_SVHN_TEST,
            channel_means=(0.4377, 0.4438, 0.4728),
        ),
        images.SVHN_DOWNLOADS,
        files=tuple(download.file for download in images.SVHN_DOWNLOADS),
        facts="99,289 colour images of 32×32 pixels, 10 classes; 246 MB to download",
    ),
    DataSet(
        "dermamnist",
        "spots of skin",
        medmnist.dermamnist,
        Expected(
            8010,
            2005,
            train_counts=(228, 359, 769, 80, 779, 4693, 99),
            test_counts=(66, 103, 220, 23, 223, 1341, 29),
        ),
        medmnist.DOWNLOADS,
        files=tuple(download.file for download in medmnist.DOWNLOADS),
        facts="10,015 colour images of 28×28 pixels, 7 classes; 20 MB to download",
    ),
    DataSet(
        "imdb",
        "film reviews, positive or negative",
        imdb.imdb,
        Expected(
            25000,
            25000,
            train_counts=(12500,) * 2,
            test_counts=(12500,) * 2,
            text="Story of a man who has unnatural",
        ),
        imdb.DOWNLOADS,
        _convert_imdb,
        imdb.FILES,
        "50,000 texts, 2 classes; 84 MB to download",
    ),
    DataSet(
        "enwik8",
        "English Wikipedia, byte by byte",
        characters.enwik8,
        Expected(899_999 + 49_999, 49_999, text="<mediawiki xmlns="),
        characters.DOWNLOADS,
        files=tuple(download.file for download in characters.DOWNLOADS),
        facts="100 million bytes in sequences of 100, the next byte is predicted; 36 MB to download",
    ),
    _uci(
        "boston",
        "house values in Boston",
        Expected(455, 51, 20, num_features=13, target=(22.53, 9.188)),
    ),
    _uci(
        "concrete",
        "strength of concrete",
        Expected(927, 103, 20, num_features=8, target=(35.82, 16.70)),
    ),
    _uci(
        "energy",
        "heating load of buildings",
        Expected(691, 77, 20, num_features=8, target=(22.31, 10.08)),
    ),
    _uci(
        "kin8nm",
        "reach of a simulated robot arm",
        Expected(7373, 819, 20, num_features=8, target=(0.7143, 0.2636)),
    ),
    _uci(
        "naval",
        "decay of a ship's compressor",
        Expected(10741, 1193, 20, num_features=16, target=(0.9750, 0.01472)),
    ),
    _uci(
        "power",
        "output of a power plant",
        Expected(8611, 957, 20, num_features=4, target=(454.4, 17.07)),
    ),
    _uci(
        "protein",
        "deviation of protein structures",
        Expected(41157, 4573, 5, num_features=9, target=(7.749, 6.118)),
    ),
    _uci(
        "wine",
        "quality of red wine",
        Expected(1439, 160, 20, num_features=11, target=(5.636, 0.8073)),
    ),
    _uci(
        "yacht",
        "resistance of yachts",
        Expected(277, 31, 20, num_features=6, target=(10.50, 15.14)),
    ),
)

DATASETS: dict[str, DataSet] = {dataset.name: dataset for dataset in _SETS}
