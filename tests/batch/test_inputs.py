"""What a job reads: every kind of source gives the same images, in pieces that can be read again from the middle."""

import csv
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from perlclip.batch.inputs import Piece, make_plan, read_piece
from perlclip.data.images import Unreadable, content_of
from perlclip.errors import PerlclipError

arrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


@pytest.fixture(scope="module")
def places(tree, tmp_path_factory) -> dict[str, str]:
    """The images of a tree in every form, by what it is called."""
    root = tmp_path_factory.mktemp("sources")
    paths = sorted(tree.rglob("*.png"))
    with (root / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerows([("label", "file_name"), *(("?", str(path)) for path in paths)])
    (root / "list.jsonl").write_text("".join(json.dumps({"path": str(path)}) + "\n" for path in paths))
    (root / "list.txt").write_text("".join(f"{path}\r\n" for path in paths))
    (root / "webdataset").mkdir()
    for n, part in enumerate((paths[:10], paths[10:])):
        with tarfile.open(root / "webdataset" / f"{n:05}.tar", "w") as tar:
            for i, path in enumerate(part):
                key = f"{n:05}{i:04}"
                for name, content in ((f"{key}.png", path.read_bytes()), (f"{key}.json", b"{}"), (f"{key}.txt", b"x")):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        (root / "webdataset" / f"{n:05}.parquet").write_bytes(b"img2dataset's own table has no images")
    with tarfile.open(root / "packed.tar.gz", "w:gz") as tar, zipfile.ZipFile(root / "packed.zip", "w") as archive:
        for path in paths:
            tar.add(path, str(path.relative_to(tree)))
            archive.write(path, str(path.relative_to(tree)))
    held = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    parquet.write_table(arrow.table({"image": held, "label": [0] * 24}), root / "held.parquet", row_group_size=5)
    named = {"key": [f"k{i}" for i in range(24)], "jpg": [path.read_bytes() for path in paths]}
    parquet.write_table(arrow.table(named), root / "named.parquet")
    parquet.write_table(arrow.table({"path": [str(path) for path in paths]}), root / "paths.parquet")
    names = {
        "csv": "list.csv", "jsonl": "list.jsonl", "lines": "list.txt", "tars": "webdataset", "tar.gz": "packed.tar.gz",
        "braces": "webdataset/{00000..00001}.tar", "zip": "packed.zip", "held": "held.parquet",
        "named": "named.parquet", "paths": "paths.parquet",
    }  # fmt: skip
    addresses = {"address": "paths.parquet", "address of a tar": "webdataset/*.tar", "address of a list": "list.csv"}
    return (
        {form: f"{root}/{name}" for form, name in names.items()}
        | {form: f"file://{root}/{name}" for form, name in addresses.items()}
        | {"folder": str(tree), "glob": f"{tree}/*/*.png", "addresses": f"file://{tree}/*/*.png"}
    )


FORMS = ("folder", "glob", "csv", "jsonl", "lines", "tars", "braces", "tar.gz", "zip", "held", "named", "paths")
FORMS += ("address", "address of a tar", "address of a list", "addresses")


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_source_gives_the_same_images(form, places, tree, tmp_path):
    want = [path.read_bytes() for path in sorted(tree.rglob("*.png"))]
    pieces = make_plan([places[form]], tmp_path / "listed", 7)
    found = [each for piece in pieces for each in read_piece(piece, tmp_path / "listed")]
    assert [content_of(source) for _, source in found] == want
    assert len({key for key, _ in found}) == 24, "keys tell images apart"
    known = [piece.count for piece in pieces if piece.count is not None]
    assert sum(known) == 24 and max(known) <= 7 + 17 * (form in ("named", "paths", "address")) if known else form
    keys = {"tars": "000010003", "named": "k13", "lines": str(sorted(tree.rglob("*.png"))[13])}
    if form in keys:
        assert found[13][0] == keys[form]


def test_stdin_and_several_sources_are_one_list(places, tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tree)
    names = b"red/0.png\0blue/1.png\0"
    pieces = make_plan(["-", places["named"], "red/2.png"], tmp_path / "listed", 100, io.BytesIO(names))
    assert [piece.kind for piece in pieces] == ["list", "table", "list"]
    monkeypatch.chdir(tmp_path)  # who goes on may stand elsewhere
    (first, source), second = read_piece(pieces[0], tmp_path / "listed")
    assert first == "red/0.png" and content_of(source) == (tree / "red" / "0.png").read_bytes()
    assert second[0] == "blue/1.png" and [key for key, _ in read_piece(pieces[2], tmp_path / "listed")] == ["red/2.png"]


def test_what_is_damaged_is_a_row_and_what_is_gone_an_error(places, tmp_path):
    whole = Path(places["tars"]) / "00000.tar"
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:5000])
    (tmp_path / "none.tar").write_bytes(b"\0" * 1024)
    for name, count in (("cut.tar", 2), ("none.tar", 1)):
        (piece,) = make_plan([str(tmp_path / name)], tmp_path / "listed", 100)
        *rest, (key, last) = read_piece(piece, tmp_path / "listed")
        assert len(rest) <= count and key == str(tmp_path / name) and isinstance(last, Unreadable)
        assert name in last.reason
    (tmp_path / "none.tar").write_bytes(b"\0" * 2048)
    with pytest.raises(PerlclipError, match="has changed since the job began"):
        list(read_piece(piece, tmp_path / "listed"))
    with pytest.raises(FileNotFoundError):
        list(read_piece(Piece(kind="archive", where=str(tmp_path / "gone.tar")), tmp_path / "listed"))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("gone.jpg", "no such image"),
        ("*.jpg", "no file matches"),
        ("nowhere://a/b.tar", "nowhere"),
        ("{9..1}.tar", "is not a range"),
        ("empty", "no images to label"),
        ("bad.csv", "there must be a column 'path'"),
        ("bad.parquet", "as parquet"),
        ("numbers.parquet", "no column of image files or paths"),
    ],
)
def test_what_cannot_be_a_source_is_said_before_anything_is_done(source, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("bad.csv").write_text("a,b\n1,2\n")
    Path("bad.parquet").write_bytes(b"PAR1")
    parquet.write_table(arrow.table({"a": [1]}), "numbers.parquet")
    with pytest.raises(PerlclipError, match=sentence):
        make_plan([source], tmp_path / "listed", 100)
