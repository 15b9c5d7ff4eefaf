//! What a stranger sees first on docs.rs: no name before `PgLockClient` that few need, links that work from
//! there, and pictures that can be read in any theme.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::source::walk;

/// Where docs.rs shows the files of a package, which needs no public repository.
const PACKAGED: &str = "https://docs.rs/crate/syncguard/latest/source/";

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(top().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What stands between two marks, each time.
fn between<'a>(text: &'a str, from: &str, to: &[char]) -> Vec<&'a str> {
    text.split(from).skip(1).filter_map(|rest| rest.split(to).next()).collect()
}

/// Whether a file is in the package: by its folder, its name, or a pattern for the files of a folder.
fn is_packaged(path: &str, include: &[&str]) -> bool {
    include.iter().any(|pattern| {
        let pattern = pattern.trim_start_matches('/');
        let below = path.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let matches = pattern.split_once('*').is_some_and(|(folder, end)| {
            path.strip_prefix(folder)
                .and_then(|rest| rest.strip_suffix(end))
                .is_some_and(|it| !it.contains('/'))
        });
        below || matches
    })
}

/// The links of this text into the package that lead to no file of it.
fn unpackaged<'a>(text: &'a str, include: &[&str]) -> Vec<&'a str> {
    let linked = between(text, PACKAGED, &[')', '\n', '#', ' ', '>']);
    linked.into_iter().filter(|path| !is_packaged(path, include) || !top().join(path).is_file()).collect()
}

#[test]
fn every_page_that_the_documentation_links_to_is_in_the_package() {
    let manifest = read("Cargo.toml");
    let list = manifest.lines().find(|line| line.starts_with("include = ")).expect("a list of files");
    let include: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
    let mut links = 0;
    walk(&top().join("src"), &mut |path| {
        let text = fs::read_to_string(path).expect("a source");
        links += text.matches(PACKAGED).count();
        assert_eq!(unpackaged(&text, &include), Vec::<&str>::new(), "{}", path.display());
        let unlinked: Vec<&str> = text
            .lines()
            .filter(|line| line.trim_start().starts_with("//") && line.contains("`docs/"))
            .filter(|line| !line.contains(PACKAGED) && !line.trim_start().starts_with("// "))
            .collect();
        let crate_docs = unlinked
            .into_iter()
            .filter(|line| path.ends_with("lib.rs") || line.trim_start().starts_with("///"));
        assert_eq!(crate_docs.collect::<Vec<_>>(), Vec::<&str>::new(), "{}: not a link", path.display());
    });
    assert!(links > 20, "only {links} links were found");
    // A public repository shows pages as pages: with an address there, the links belong to it.
    assert!(!manifest.contains("\nrepository = "), "let PACKAGED be the pages of the repository");

    for gone in ["docs/gone.md", "docs/adr/README.md", "scripts/test"] {
        let text = format!("[x]({PACKAGED}{gone})");
        assert_eq!(unpackaged(&text, &include), [gone]);
    }
    assert_eq!(
        unpackaged(&format!("[x]: {PACKAGED}docs/fencing.md#the-gap\n"), &include),
        Vec::<&str>::new()
    );
}

/// The re-exports at the root that rustdoc would list above everything else.
fn listed_first(root: &str) -> Vec<&str> {
    let modules: Vec<&str> = root.lines().filter_map(|line| line.strip_prefix("pub mod ")).collect();
    let is_shown_apart = |path: &str| {
        modules.iter().any(|module| path.starts_with(&module.replace(';', "::"))) || path.starts_with('{')
    };
    let lines: Vec<&str> = root.lines().collect();
    let pairs = lines.windows(2).filter_map(|pair| match pair {
        [before, line] => Some((*before, line.strip_prefix("pub use ")?)),
        _ => None,
    });
    pairs
        .filter(|(before, path)| {
            is_shown_apart(path) && !["#[doc(inline)]", "#[doc(hidden)]"].contains(before)
        })
        .map(|(_, path)| path)
        .collect()
}

#[test]
fn no_list_of_re_exports_stands_before_the_client() {
    let root = read("src/lib.rs");
    assert!(root.contains("\npub mod backend;\n"), "the public modules were not found");
    assert_eq!(listed_first(&root), Vec::<&str>::new());
    let naked = "pub mod backend;\n#[doc(inline)]\npub use backend::Slot;\n\npub use backend::Reason;\npub use {r2d2};\n";
    assert_eq!(listed_first(naked), ["backend::Reason;", "{r2d2};"]);
    assert!(read("Cargo.toml").contains("[package.metadata.docs.rs]\nall-features = true\n"));
}

/// The pictures by their names, with their text.
fn pictures() -> Vec<(String, String)> {
    let mut found = Vec::new();
    walk(&top().join("docs/pictures"), &mut |path| {
        if path.extension().is_some_and(|kind| kind == "svg") {
            let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
            found.push((name.to_owned(), fs::read_to_string(path).expect("a picture")));
        }
    });
    assert!(found.len() >= 4, "pictures were not found: {found:?}");
    found
}

/// Why a picture cannot stand inside of Markdown, beside others, in any theme.
fn faults(picture: &str) -> Vec<&'static str> {
    let first = picture.lines().next().unwrap_or_default();
    let rules = picture.split("<style>").nth(1).and_then(|rest| rest.split("</style>").next());
    let painted = between(picture, " class=\"", &['"']).into_iter().flat_map(str::split_whitespace);
    let dark = |class: &str| {
        ["@media (prefers-color-scheme:dark)", &format!("[data-theme=\"dark\"] .{class},")]
            .iter()
            .all(|part| rules.is_some_and(|rules| rules.contains(part)))
    };
    let mut faults = Vec::new();
    let mut found = |is: bool, what| {
        if is {
            faults.push(what);
        }
    };
    found(!first.starts_with("<svg ") || !first.ends_with('>'), "its first line is not one whole tag");
    found(picture.lines().any(|line| line.trim().is_empty()), "an empty line ends the block");
    found(picture.contains(" id="), "a name that is of the page, not of the picture");
    found(!first.contains("aria-label=") || !picture.contains("<title>"), "nothing to read aloud");
    found(!picture.contains("<rect x=\"0.5\" y=\"0.5\""), "no background of its own");
    found(painted.into_iter().any(|class| !dark(class)), "a colour for the day only");
    faults
}

#[test]
fn pictures_can_stand_in_documents_and_be_read_by_night() {
    let (mut shown, mut included) = (String::new(), String::new());
    walk(&top().join("docs"), &mut |path| {
        if path.extension().is_some_and(|kind| kind == "md") {
            shown += &fs::read_to_string(path).expect("a page");
        }
    });
    walk(&top().join("src"), &mut |path| included += &fs::read_to_string(path).expect("a source"));
    for (name, picture) in pictures() {
        assert_eq!(faults(&picture), Vec::<&str>::new(), "{name}");
        assert!(shown.contains(&format!("](pictures/{name})")), "no page shows {name}");
        assert!(included.contains(&format!("docs/pictures/{name}\")]")), "rustdoc does not show {name}");
    }
    let (_, good) = pictures().remove(0);
    for (from, to, fault) in [
        ("<svg ", "<g><svg ", "its first line is not one whole tag"),
        ("</title>\n", "</title>\n\n", "an empty line ends the block"),
        ("<rect ", "<rect id=\"a\" ", "a name that is of the page, not of the picture"),
        ("<title>", "<text>", "nothing to read aloud"),
        ("<rect x=\"0.5\"", "<rect x=\"9\"", "no background of its own"),
        (" class=\"sg-fill-text\"", " class=\"sg-fill-other\"", "a colour for the day only"),
    ] {
        assert!(faults(&good.replacen(from, to, 1)).contains(&fault), "{from}");
    }
}

#[test]
fn pictures_are_what_their_script_draws() {
    let drawn = Command::new("python3")
        .args(["-B", "docs/pictures/draw.py", "--check"])
        .current_dir(top())
        .output()
        .expect("python3 is installed");
    assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
}
