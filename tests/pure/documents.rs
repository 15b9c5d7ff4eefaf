//! What the documents say about the repository is true, where a machine can tell: links lead
//! somewhere, pictures can be drawn, lists are complete. That their Rust compiles is the doc tests' part.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::source::walk;

/// Words that are written in one way, as nouns: together. Apart here, so that this file has no other way.
const TOGETHER: [(&str, &str); 12] = [
    ("clean", "up"),
    ("fail", "over"),
    ("for", "ever"),
    ("hand", "off"), // a handover
    ("hand", "over"),
    ("look", "up"),
    ("roll", "back"),
    ("set", "up"),
    ("shut", "down"),
    ("start", "up"),
    ("take", "over"),
    ("time", "out"),
];

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
    let mut found: Vec<PathBuf> = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
        .iter()
        .map(|name| top().join(name))
        .collect();
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

/// Whether a file is of the repository: what lies beside it is there on one machine only.
fn is_inside(target: &Path) -> bool {
    top().canonicalize().is_ok_and(|top| target.starts_with(top))
}

/// What is wrong with the links of a document in this folder.
fn dead(folder: &Path, text: &str) -> Vec<String> {
    let alive = |link: &str| {
        let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
        let other = if path.is_empty() {
            text.to_owned()
        } else {
            let Ok(target) = folder.join(path).canonicalize() else { return false };
            if anchor.is_empty() || !is_inside(&target) {
                return is_inside(&target);
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
    let page = "# Why, and `how`\n[a](#why-and-how) [b](docs/options.md#limits) [c](https://example.com/x)\n";
    assert_eq!(dead(top(), page), Vec::<String>::new());
    for link in ["#why", "README.md#no-such-heading", "no-such-file.md", "docs/gone.md#limits", "..", "/etc"]
    {
        assert_eq!(dead(top(), &format!("# Why\n[x]({link})").replace("# Why", "# What")), [link]);
    }
}

/// The names in `[text][name]` that no line `[name]: address` explains: they would be shown as they are.
fn unexplained(text: &str) -> Vec<String> {
    let prose = parts(text).0;
    let is_name = |name: &&str| name.starts_with(|c: char| c.is_ascii_lowercase()) && !name.contains(' ');
    let used =
        prose.iter().flat_map(|line| line.split("][").skip(1)).filter_map(|rest| rest.split(']').next());
    let is_explained = |name: &str| prose.iter().any(|line| line.starts_with(&format!("[{name}]: https://")));
    used.filter(is_name).filter(|name| !is_explained(name)).map(str::to_owned).collect()
}

#[test]
fn every_source_that_is_named_has_its_address() {
    let mut sources = 0;
    for (path, text) in documents() {
        sources += text.matches("]: https://").count();
        assert_eq!(unexplained(&text), Vec::<String>::new(), "{}", path.display());
    }
    assert!(sources > 20, "only {sources} sources were found");
    assert_eq!(unexplained("see [it][there], [them][here]\n\n[here]: https://example.com\n"), ["there"]);
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

/// The features of the manifest, without what they stand for.
fn features(manifest: &str) -> Vec<&str> {
    let section = manifest.split("\n[features]\n").nth(1).expect("the features");
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    lines.filter_map(|line| line.split_once(" = [")).map(|(name, _)| name).collect()
}

#[test]
fn every_feature_is_in_the_table_and_is_built_alone_and_with_all_others() {
    let (manifest, page) = (read("Cargo.toml"), read("docs/features.md"));
    let (test, release) = (read("scripts/test"), read("scripts/release"));
    let features = features(&manifest);
    assert!(features.len() >= 5, "features were not found: {features:?}");
    let all = features.join(" ");
    assert!(
        test.contains(&format!("for feature in {all};")),
        "scripts/test builds other features than {all}"
    );
    assert!(
        release.contains(&format!("FEATURES=({all})")),
        "scripts/release builds other features than {all}"
    );
    for feature in features {
        assert!(page.contains(&format!("| `{feature}` |")), "docs/features.md lacks {feature}");
    }
}

#[test]
fn the_table_of_foreign_types_has_the_versions_that_are_used() {
    let (manifest, page) = (read("Cargo.toml"), read("docs/features.md"));
    let table = page.split("## Foreign types").nth(1).expect("the table");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut seen = 0;
    for row in rows {
        let cells: Vec<&str> = row.split(" | ").collect();
        let [names, versions, ..] = cells.as_slice() else { panic!("{row}") };
        let names = names.split(", ").map(|name| name.trim_matches('`'));
        for (name, version) in names.zip(versions.split(", ")) {
            let line = manifest.lines().find(|line| line.starts_with(&format!("{name} = ")));
            let stated = line.and_then(|line| line.split('"').nth(1)).expect("a dependency with a version");
            assert!(
                stated == version || stated.starts_with(&format!("{version}.")),
                "{name}: the page says {version}, Cargo.toml {stated}"
            );
            seen += 1;
        }
    }
    assert!(seen >= 7, "only {seen} crates are in the table");
}

#[test]
fn every_option_is_in_the_table() {
    let page = read("docs/options.md");
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

/// Other spellings of the words in [`TOGETHER`]: with a hyphen or, for the adverb, a space; and one more for a handover.
fn misspelt(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || "-_./".contains(c));
    let mut found = Vec::new();
    for (first, second) in TOGETHER {
        let between = if first == "for" { " " } else { "-" };
        let mut wrong = vec![format!("{first}{between}{second}")];
        if second == "off" {
            wrong.push(format!("{first}{second}"));
        }
        for word in wrong {
            let stands = |at: usize| {
                let (before, rest) = text.split_at(at);
                let after = rest.get(word.len()..).unwrap_or_default();
                let after = after.strip_prefix('s').unwrap_or(after).chars().next();
                !is_part(before.chars().next_back())
                    && !after.is_some_and(|c| c.is_alphanumeric() || c == '-')
            };
            found.extend(text.match_indices(&word).filter(|(at, _)| stands(*at)).map(|_| word.clone()));
        }
    }
    found
}

/// Decisions are not rewritten; everything else keeps to one spelling.
#[test]
fn a_word_is_spelt_in_one_way() {
    let (mut broken, mut files) = (Vec::new(), 0);
    walk(top(), &mut |path| {
        let name = path.strip_prefix(top()).unwrap_or(path).display().to_string();
        // Names of files and other people's packages.
        if name.starts_with("docs/adr/") || path.extension().is_some_and(|kind| kind == "lock") {
            return;
        }
        let Ok(text) = fs::read_to_string(path) else { return };
        files += 1;
        broken.extend(misspelt(&text).into_iter().map(|word| format!("{name}: {word}")));
    });
    assert!(files > 100, "only {files} files were read");
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));

    for (first, second) in TOGETHER {
        let between = if first == "for" { " " } else { "-" };
        assert_eq!(misspelt(&format!("A {first}{between}{second}.")).len(), 1, "{first}, {second}");
        assert_eq!(misspelt(&format!("They {first} it {second}")), Vec::<String>::new());
    }
    assert_eq!(misspelt(&format!("adr/0014-{}-{}-and-callers-pools.md", "set", "up")), Vec::<String>::new());
    assert_eq!(misspelt(&["hand", "offs"].concat()).len(), 1);
}
