"""The site of the documentation, as a folder."""

def _site_impl(ctx):
    output = ctx.actions.declare_directory(ctx.label.name)
    args = ctx.actions.args()
    args.add(".")
    args.add(output.path)
    ctx.actions.run(
        executable = ctx.executable._build_site,
        arguments = [args],
        # All pages get a date of 1980, so that the bytes of the folder are reproducible.
        env = {"SOURCE_DATE_EPOCH": "315532800"},
        inputs = ctx.files.srcs,
        outputs = [output],
        mnemonic = "Site",
        progress_message = "Building the site in %{output}",
    )
    return [DefaultInfo(files = depset([output]))]

site = rule(
    implementation = _site_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True, doc = "Every file that a page may link to."),
        "_build_site": attr.label(default = "//tools/site:build_site", cfg = "exec", executable = True),
    },
)
