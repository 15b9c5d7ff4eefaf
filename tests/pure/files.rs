//! Every file of the repository, as a file: how long it may be, and what must not stand in it.

#![allow(clippy::expect_used, reason = "a test says by a panic what it did not expect")]

use std::fs;
use std::path::Path;

use crate::source::{Source, read_all, walk};

const MAX_LINES: usize = 500;

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Comments are not counted: or a file would be shortened by its reasons.
fn too_long(source: &Source) -> Option<String> {
    let (file, lines) = (&source.file, source.lines);
    (lines > MAX_LINES).then(|| format!("{file}: {lines} lines without comments, the most is {MAX_LINES}"))
}

#[test]
fn no_file_is_too_long_to_read_in_one_sitting() {
    for folder in ["src", "cli", "contract/src", "ffi/src", "tests", "examples", "benches"] {
        let sources = read_all(top(), folder);
        assert!(!sources.is_empty(), "{folder} was not found");
        assert_eq!(sources.iter().filter_map(too_long).collect::<Vec<_>>(), Vec::<String>::new());
    }
    let of = |text: String| too_long(&Source::parse("src/error.rs", &text).expect("the sample is Rust"));
    assert_eq!(of("\n".repeat(MAX_LINES)), None);
    assert!(of("\n".repeat(MAX_LINES + 1)).is_some());
    assert_eq!(of("/// words\n".repeat(MAX_LINES + 1)), None);
}

/// Directories of somebody's machine, written apart so that this file does not mention them.
const LOCAL: [[&str; 2]; 5] =
    [["/wo", "rk/"], ["/tmp", "/h/"], ["/ro", "ot/"], ["/ho", "me/"], ["/Us", "ers/"]];

fn local_paths(text: &str) -> Vec<(usize, &str)> {
    let names = |line: &str, dir: &str| {
        line.match_indices(dir).any(|(at, _)| {
            let before = line.get(..at).and_then(|before| before.chars().next_back());
            let after = line.get(at + dir.len()..).unwrap_or_default();
            // Not the middle of a longer path or of a URL; where Homebrew lives is public.
            before.is_none_or(|c| !c.is_alphanumeric() && !"._-/}$".contains(c))
                && !after.starts_with("linuxbrew")
        })
    };
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| LOCAL.iter().any(|dir| names(line, &dir.concat())))
        .map(|(n, line)| (n + 1, line))
        .collect()
}

#[test]
fn no_file_mentions_a_path_of_somebodys_machine() {
    let mut broken = Vec::new();
    let mut files = 0;
    walk(top(), &mut |path| {
        // What is not text is no document.
        let Ok(text) = fs::read_to_string(path) else { return };
        files += 1;
        let name = path.strip_prefix(top()).unwrap_or(path).display().to_string();
        broken.extend(local_paths(&text).into_iter().map(|(line, text)| format!("{name}:{line}: {text}")));
    });
    assert!(files > 10, "only {files} files were read");
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
    for dir in LOCAL {
        assert_eq!(local_paths(&format!("see `{}x`", dir.concat())).len(), 1);
        assert_eq!(local_paths(&format!("https://example.org{}x", dir.concat())).len(), 0);
    }
}
