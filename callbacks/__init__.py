"""Every callback, one a file. Import them as ``rlightning.callbacks``."""

if __name__ != "rlightning.callbacks":
    raise ImportError(f"imported as '{__name__}': two copies of a class break isinstance. Import rlightning.callbacks.")
