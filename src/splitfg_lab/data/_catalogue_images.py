"""CIFAR: the official binary archives and batches, with published checksums."""

from __future__ import annotations

from splitfg_lab.data.specs import Download, ImageFile, ImageSet, Known, Unsupported

_CIFAR = "https://www.cs.toronto.edu/~kriz/"


def _raw(*names: str) -> tuple[str, ...]:
    return tuple(pattern for name in names for pattern in (f"images/{name}", name))


def _cifar(
    classes: int, *, label_bytes: int, md5: str, unpacked: tuple[str, str], files: tuple[ImageFile, ...]
) -> ImageSet:
    """Describe CIFAR-10 or CIFAR-100; ``unpacked`` names the folders in the binary and the python archive."""
    binary, python = (f"cifar-{classes}-{version}.tar.gz" for version in ("binary", "python"))
    return ImageSet(
        name=f"cifar{classes}",
        title=f"CIFAR-{classes} (50,000 + 10,000 images, {classes} classes)",
        origin="Krizhevsky 2009",
        licence="no licence stated; cite the technical report",
        verified="checksum of the archive and of every batch",
        downloads=(Download(f"images/{binary}", (_CIFAR + binary,), f"md5:{md5}"),),
        raw=_raw(binary, unpacked[0]),
        unsupported=Unsupported(
            _raw(python, unpacked[1]),
            "the python version, whose pickles can run code when read: "
            f"use the same images in {binary} ({_CIFAR}{binary})",
        ),
        classes=classes,
        label_bytes=label_bytes,
        files=files,
    )


_CIFAR10_SHA256 = (
    ("data_batch_1", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    ("data_batch_2", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    ("data_batch_3", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    ("data_batch_4", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    ("data_batch_5", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)

CIFAR10 = _cifar(
    10,
    label_bytes=1,
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    unpacked=("cifar-10-batches-bin", "cifar-10-batches-py"),
    files=tuple(
        ImageFile(f"{name}.bin", "test" if name == "test_batch" else "train", 10_000, (Known(f"sha256:{sha}"),))
        for name, sha in _CIFAR10_SHA256
    ),
)

_CLASS_ORDER = "the official images and splits, stored class by class: shuffle"

CIFAR100 = _cifar(
    100,
    label_bytes=2,
    md5="03b5dce01913d631647c71ecec9e9cb8",
    unpacked=("cifar-100-binary", "cifar-100-python"),
    files=(
        ImageFile(
            "train.bin",
            "train",
            50_000,
            (
                Known("sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
                Known("sha256:860dd9f1f5d60e0eca68676148ffde4644b595dbe1092af186b56f7255ace420", _CLASS_ORDER),
            ),
        ),
        ImageFile(
            "test.bin",
            "test",
            10_000,
            (
                Known("sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
                Known("sha256:b1a3acbb035950f9f6bfbe8745c9a6f1931e5197b60b098631b6b2dae4ed0180", _CLASS_ORDER),
            ),
        ),
    ),
)
