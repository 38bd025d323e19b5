"""The user's cache folder, which all checkouts on a machine share."""

CACHE_ENVIRON = ["HOME", "XDG_CACHE_HOME"]

def cache_folder(rctx):
    """Returns the path of hybridkv's folder in the user's cache; None if neither XDG_CACHE_HOME nor HOME is set."""
    environ = rctx.os.environ
    cache = environ.get("XDG_CACHE_HOME") or (environ["HOME"] + "/.cache" if environ.get("HOME") else None)
    return cache + "/hybridkv" if cache else None

def make_once(rctx, folder, make):
    """Makes a folder that all checkouts share, if it does not exist. Another checkout may do the same at the same time.

    Args:
        rctx: the repository rule's context.
        folder: the folder's path. A failed or interrupted make leaves nothing there.
        make: a function that is given a path, and fills a folder at that path.
    """
    if rctx.path(folder).exists:
        return
    new = rctx.execute(["sh", "-c", 'mkdir -p "$(dirname "$1")" && mktemp -d "$1.XXXXXX"', "-", folder])
    if new.return_code:
        fail("cannot write to {}: {}".format(folder, new.stderr))
    partial = new.stdout.strip()
    make(partial)

    # If another checkout was first, its folder is kept.
    rctx.execute(["sh", "-c", 'chmod 755 "$1" && mv -T "$1" "$2" || rm -rf "$1"', "-", partial, folder])
    if not rctx.path(folder).exists:
        fail("cannot write to " + folder)
