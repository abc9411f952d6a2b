"""The eight tables of the paper, with the counts that the paper gives.

OpenML publishes no checksums of its parquet files, so ``prepare`` counts rows, columns and classes.
"""

from __future__ import annotations

from typing import TypedDict

from splitfg_lab.data.specs import Download, TableSet, Unsupported

_COUNTED = "rows, columns and classes are counted; OpenML publishes no checksum of its parquet files"


class _Files(TypedDict):
    """Arguments of a :class:`TableSet` that follow from its id at OpenML."""

    downloads: tuple[Download, ...]
    raw: tuple[str, ...]
    unsupported: Unsupported
    openml: int


def _openml(data_id: int, *stems: str) -> _Files:
    """Return the files of a table at OpenML, which local files may name by any of ``stems``."""
    url = f"https://data.openml.org/datasets/{data_id // 10000:04d}/{data_id:04d}/dataset_{data_id}.pq"
    return _Files(
        downloads=(Download(f"tabular/{stems[0]}.parquet", (url,)),),
        raw=_tables(*stems),
        unsupported=Unsupported(
            tuple(f"tabular/{stem}.arff" for stem in stems),
            f"an ARFF file, which splitfg does not read: use OpenML's parquet file of the same table ({url})",
        ),
        openml=data_id,
    )


def _tables(*stems: str) -> tuple[str, ...]:
    return tuple(f"tabular/{stem}.{suffix}" for stem in stems for suffix in ("parquet", "csv"))


ADULT = TableSet(
    name="adult",
    title="Adult (census income)",
    origin="UCI; OpenML 1590",
    licence="CC BY 4.0",
    verified=_COUNTED,
    **_openml(1590, "adult"),
    task="binary",
    targets=("income", "class"),
    drop=("split",),
    categorical=(
        "workclass",
        "education",
        "marital-status",
        "occupation",
        "relationship",
        "race",
        "sex",
        "native-country",
    ),
    rows=48_842,
    features=14,
    classes=2,
)

HIGGS_SMALL = TableSet(
    name="higgs_small",
    title="Higgs Small (particle physics)",
    origin="UCI HIGGS, the 98,050 rows of OpenML 23512",
    licence="CC BY 4.0",
    verified=_COUNTED,
    **_openml(23512, "higgs_small", "higgs"),
    task="binary",
    targets=("class",),
    rows=98_050,
    features=28,
    classes=2,
)

OTTO = TableSet(
    name="otto",
    title="Otto Group Products (e-commerce)",
    origin="Kaggle, Otto Group product classification challenge",
    licence="Kaggle competition rules: use, do not redistribute",
    verified="rows, columns and classes are counted; no checksum is public",
    raw=_tables("otto"),
    by_hand="download train.csv from https://www.kaggle.com/c/otto-group-product-classification-challenge/data",
    task="multiclass",
    targets=("target",),
    drop=("id",),
    rows=61_878,
    features=93,
    classes=9,
)

COVERTYPE = TableSet(
    name="covertype",
    title="Covertype (forest cartography)",
    origin="UCI; OpenML 1596",
    licence="CC BY 4.0",
    verified=_COUNTED,
    **_openml(1596, "covertype", "covtype"),
    task="multiclass",
    targets=("Cover_Type", "class"),
    rows=581_012,
    features=54,
    classes=7,
)

CALIFORNIA = TableSet(
    name="california",
    title="California Housing (StatLib's raw columns)",
    origin="StatLib, Pace and Barry 1997; OpenML 537",
    licence="public, no licence stated",
    verified=_COUNTED,
    **_openml(537, "california", "california_housing"),
    task="regression",
    targets=("medianHouseValue",),
    rows=20_640,
    features=8,
)

HOUSE_16H = TableSet(
    name="house_16h",
    title="House 16H (housing prices, 1990 census)",
    origin="DELVE, US Census Bureau; OpenML 574",
    licence="public, no licence stated",
    verified=_COUNTED,
    **_openml(574, "house_16h", "house_16H"),
    task="regression",
    targets=("target", "price"),
    rows=22_784,
    features=16,
)

DIAMOND = TableSet(
    name="diamond",
    title="Diamond (diamond prices)",
    origin="ggplot2, Kaggle; OpenML 42225",
    licence="MIT (ggplot2)",
    verified=_COUNTED,
    **_openml(42225, "diamond", "diamonds"),
    task="regression",
    targets=("price",),
    categorical=("cut", "color", "clarity"),
    rows=53_940,
    features=9,
)

BLACK_FRIDAY = TableSet(
    name="black_friday",
    title="Black Friday (retail purchases)",
    origin="Kaggle; OpenML 41540",
    licence="use, do not redistribute",
    verified=_COUNTED,
    **_openml(41540, "black_friday"),
    task="regression",
    targets=("Purchase",),
    categorical=("Gender", "Age", "City_Category", "Stay_In_Current_City_Years"),
    rows=166_821,
    features=9,
)

TABLES = (ADULT, HIGGS_SMALL, OTTO, COVERTYPE, CALIFORNIA, HOUSE_16H, DIAMOND, BLACK_FRIDAY)
