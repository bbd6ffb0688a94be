"""`kernels` is also a Hugging Face package: from the repository's root that name must lead to it, or to nothing."""

from helpers.project import ROOT, run_python


def make_package(site, source):
    package = site / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    (package / "layer.py").write_text("NAME = __name__\n")
    return site


def test_hands_over_to_the_installed_package(tmp_path):
    site = make_package(tmp_path / "site", "from kernels.layer import NAME\nVALUE = 7\n")
    code = "import kernels, kernels.layer as layer; print(kernels.VALUE, layer.NAME, kernels.__file__)"
    done = run_python("-c", code, cwd=ROOT, path=(site,))
    assert done.stdout.split() == ["7", "kernels.layer", str(site / "kernels" / "__init__.py")]


def test_find_spec_sees_the_installed_package_after_the_import(tmp_path):
    site = make_package(tmp_path / "site", "")
    code = "import kernels, importlib.util as u; print(u.find_spec('kernels').origin)"
    done = run_python("-c", code, cwd=ROOT, path=(site,))
    assert done.stdout.strip() == str(site / "kernels" / "__init__.py")


def test_stays_an_empty_module_without_the_package():
    code = "import kernels; print(sorted(name for name in vars(kernels) if not name.startswith('_')))"
    # -S: without site-packages, where the real package may be installed.
    done = run_python("-S", "-W", "error", "-c", code, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_survives_a_package_that_fails(tmp_path):
    site = make_package(tmp_path / "site", "VALUE = 7\nraise RuntimeError('broken')\n")
    done = run_python("-c", "import kernels; print(hasattr(kernels, 'VALUE'))", cwd=ROOT, path=(site,))
    assert done.stdout.strip() == "False"


def test_a_folder_that_is_no_package_is_not_taken(tmp_path):
    (tmp_path / "site" / "kernels").mkdir(parents=True)
    done = run_python("-S", "-c", "import kernels; print(kernels.__file__)", cwd=ROOT, path=(tmp_path / "site",))
    assert done.stdout.strip() == str(ROOT / "kernels" / "__init__.py")


def test_transformers_imports_models_from_the_root():
    done = run_python("-c", "from transformers import BertModel; print(BertModel.__name__)", cwd=ROOT)
    assert done.stdout.strip() == "BertModel"


def test_our_own_kernels_are_below_bertfast():
    done = run_python("-c", "import bertfast.kernels as k; print(k.__name__, k.__doc__.split()[0])", cwd=ROOT)
    assert done.stdout.split() == ["bertfast.kernels", "Triton"]
