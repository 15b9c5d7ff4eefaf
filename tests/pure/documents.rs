//! What the documents say about the repository is true, where a machine can tell: links lead
//! somewhere, pictures can be drawn, lists are complete. That their Rust compiles is the doc tests' part.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::source::walk;

/// A decision that needs more lines than this is two.
const LONGEST_RECORD: usize = 40;

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(top().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every document, with its text.
fn documents() -> Vec<(PathBuf, String)> {
    let mut found: Vec<PathBuf> =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].iter().map(|name| top().join(name)).collect();
    walk(&top().join("docs"), &mut |path| {
        if path.extension().is_some_and(|kind| kind == "md") {
            found.push(path.to_owned());
        }
    });
    assert!(found.len() > 40, "documents were not found: {found:?}");
    found.into_iter().map(|path| (path.clone(), fs::read_to_string(path).expect("a document"))).collect()
}

/// The lines outside of code blocks, and the blocks with their language.
fn parts(text: &str) -> (Vec<&str>, Vec<(&str, String)>) {
    let (mut prose, mut blocks, mut inside) = (Vec::new(), Vec::new(), false);
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), inside) {
            (Some(language), false) => {
                blocks.push((language, String::new()));
                inside = true;
            }
            (Some(_), true) => inside = false,
            (None, true) => {
                let (_, block) = blocks.last_mut().expect("a block was opened");
                block.push_str(line);
                block.push('\n');
            }
            (None, false) => prose.push(line),
        }
    }
    (prose, blocks)
}

/// The anchors that GitHub makes of a document's headings.
fn anchors(text: &str) -> Vec<String> {
    let headings = parts(text).0.into_iter().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// Where the links of a document lead to, without those to other hosts.
fn links(text: &str) -> Vec<String> {
    let prose = parts(text).0.join("\n");
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// What is wrong with the links of a document in this folder.
fn dead(folder: &Path, text: &str) -> Vec<String> {
    let alive = |link: &str| {
        let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
        let other = if path.is_empty() {
            text.to_owned()
        } else {
            let target = folder.join(path);
            if anchor.is_empty() {
                return target.exists();
            }
            fs::read_to_string(target).unwrap_or_default()
        };
        anchors(&other).iter().any(|known| known == anchor)
    };
    links(text).into_iter().filter(|link| !alive(link)).collect()
}

#[test]
fn every_link_leads_to_a_file_or_a_heading() {
    for (path, text) in documents() {
        let dead = dead(path.parent().expect("a folder"), &text);
        assert!(dead.is_empty(), "{}: {dead:?}", path.display());
    }
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let page = "# Why, and `how`\n[a](#why-and-how) [b](README.md#limits) [c](https://example.com/x)\n";
    assert_eq!(dead(top(), page), Vec::<String>::new());
    for link in ["#why", "README.md#no-such-heading", "no-such-file.md", "docs/gone.md#limits"] {
        assert_eq!(dead(top(), &format!("# Why\n[x]({link})").replace("# Why", "# What")), [link]);
    }
}

/// In a sequence diagram a semicolon ends a line and a `#` begins a character's number: whoever
/// writes one in a text gets an error instead of a picture.
fn undrawable(text: &str) -> Vec<String> {
    let pictures = parts(text).1.into_iter().filter(|(language, _)| *language == "mermaid");
    let sequences = pictures.map(|(_, picture)| picture).filter(|it| it.starts_with("sequenceDiagram"));
    let lines = |picture: String| picture.lines().map(str::to_owned).collect::<Vec<_>>();
    sequences.flat_map(lines).filter(|line| line.contains([';', '#'])).collect()
}

#[test]
fn pictures_can_be_drawn() {
    for (path, text) in documents() {
        let broken = undrawable(&text);
        assert!(broken.is_empty(), "{}: {broken:?}", path.display());
    }
    let broken = "```mermaid\nsequenceDiagram\n    A->>B: one; two\n    B->>A: three\n```\n";
    assert_eq!(undrawable(broken), ["    A->>B: one; two"]);
}

#[test]
fn the_picture_of_the_house_names_every_file() {
    let page = read("docs/architecture.md");
    let mut missing = Vec::new();
    walk(&top().join("src"), &mut |path| {
        let inside = path.strip_prefix(top().join("src")).expect("it is in src");
        let file = inside.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let folder = inside.parent().and_then(Path::to_str).expect("a folder");
        let named = match folder {
            "" => page.contains(&format!("{file}.rs")),
            // Cases of one suite, and tests.
            "contract" | "lock/tests" => true,
            _ if page.contains(&format!("`{folder}/{file}`")) => true,
            _ => page
                .lines()
                .find(|line| line.starts_with(&format!("| `{folder}/` |")))
                .is_some_and(|row| row.contains(&format!("`{file}`"))),
        };
        if !named && !matches!(file, "mod" | "fake" | "lease_tests") {
            missing.push(inside.display().to_string());
        }
    });
    assert!(missing.is_empty(), "docs/architecture.md does not name {missing:?}");
}

#[test]
fn every_dependency_has_its_reason() {
    let (manifest, record) = (read("Cargo.toml"), read("docs/adr/0024-dependencies.md"));
    let mut section = "";
    let mut names = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section.ends_with("dependencies]")
            && !section.contains("dev-")
            && let Some((name, _)) = line.split_once(" = ")
        {
            names.push(name);
        }
    }
    assert!(names.len() > 8, "dependencies were not found: {names:?}");
    for name in names {
        assert!(record.contains(&format!("| `{name}`")), "the record on dependencies lacks {name}");
    }
}

#[test]
fn every_option_is_in_the_table() {
    let page = read("README.md");
    let makers = ["new", "connect", "connect_env", "connect_with", "build"];
    for (path, kind) in
        [("src/lock/options.rs", "LockOptions"), ("src/client/builder.rs", "PgLockClientBuilder")]
    {
        let source = read(path);
        let body = source.split(&format!("impl {kind} {{")).nth(1).expect("its methods");
        let body = body.split("\n}\n").next().expect("their end");
        let names = body.lines().filter_map(|line| line.strip_prefix("    pub fn "));
        let names: Vec<&str> = names.filter_map(|rest| rest.split(['(', '<']).next()).collect();
        assert!(names.len() > 10, "{kind}: {names:?}");
        for name in names.iter().filter(|name| !makers.contains(name)) {
            assert!(
                page.contains(&format!("`{name}`")) || page.contains(&format!("`.{name}(")),
                "{kind}::{name}"
            );
        }
    }
}

#[test]
fn a_record_is_short_and_in_the_list() {
    let list = read("docs/adr/README.md");
    walk(&top().join("docs/adr"), &mut |path| {
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        if name == "README.md" {
            return;
        }
        let text = fs::read_to_string(path).expect("a record");
        assert!(text.lines().count() <= LONGEST_RECORD, "{name} has {} lines", text.lines().count());
        let title = text.lines().next().and_then(|line| line.split_once(". ")).expect("a title").1;
        assert!(list.contains(&format!("]({name}) | {title} |")), "the list lacks {name}: {title}");
    });
}

/// A version such as 1.88 or 1.87.0, for comparison.
fn version(text: &str) -> Vec<u32> {
    let mut parts: Vec<u32> = text.split('.').map(|part| part.parse().expect("a version of Rust")).collect();
    parts.resize(3, 0);
    parts
}

#[test]
fn every_locked_dependency_builds_with_the_rust_that_is_claimed() {
    let claimed = env!("CARGO_PKG_RUST_VERSION");
    assert!(read("README.md").contains(&format!("It needs Rust {claimed} ")), "README names another Rust");
    let compiler = Command::new("rustc").arg("-vV").output().expect("rustc runs");
    let compiler = String::from_utf8(compiler.stdout).expect("text");
    let host = compiler.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--format-version=1", "--all-features", "--filter-platform", host])
        .current_dir(top())
        .output()
        .expect("cargo runs");
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).expect("valid JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let stated: Vec<(String, &str)> = packages
        .iter()
        .filter_map(|package| {
            Some((format!("{} {}", package["name"], package["version"]), package["rust_version"].as_str()?))
        })
        .collect();
    assert!(stated.len() > 50, "the dependencies say what they need: {stated:?}");
    let newer: Vec<_> = stated.iter().filter(|(_, needs)| version(needs) > version(claimed)).collect();
    assert!(newer.is_empty(), "Rust {claimed} is claimed, and Cargo.lock has what needs more: {newer:?}");
}
