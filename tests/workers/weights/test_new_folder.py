"""A new folder is like any that the user makes, and clears up after killed attempts at itself, and no others."""

from manta.workers.weights.export import new_folder


def test_new_folder_is_private_until_it_is_whole_and_then_has_usual_permissions(tmp_path):
    (tmp_path / "other").mkdir()
    with new_folder(tmp_path / "out") as folder:
        assert folder.stat().st_mode & 0o077 == 0, "until it is whole it is private"
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_new_folder_leaves_unfinished_folders_of_other_names(tmp_path):
    left = {name: tmp_path / f".{name}.x.unfinished" for name in ("a[1]", "a1", "a*", "ab")}
    for folder in left.values():
        folder.mkdir()
    for name in ("a[1]", "a*"):
        with new_folder(tmp_path / name):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"a[1]", "a*", left["a1"].name, left["ab"].name}
