//! Where our dependencies come from and what they demand, as far as it can be seen without a network.
//! `scripts/deny` looks at more, published advisories among it.

use std::process::Command;

use serde_json::Value;

/// One of these in every package's expression is enough.
const LICENCES: [&str; 5] = ["MIT", "Apache-2.0", "Unicode-3.0", "BSD-3-Clause", "ISC"];

fn metadata() -> Value {
    let version = Command::new(env!("CARGO")).arg("-vV").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--locked",
            "--offline",
            "--format-version=1",
            "--all-features",
            "--filter-platform",
            host,
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn dependencies_come_from_the_registry_under_licences_that_a_library_may_bring_along() {
    let metadata = metadata();
    let mut seen = 0;
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let Some(source) = package["source"].as_str() else { continue };
        seen += 1;
        assert_eq!(source, "registry+https://github.com/rust-lang/crates.io-index", "{name}");
        let licence = package["license"].as_str().unwrap_or("");
        // `A OR B` and the older `A/B` offer a choice; what is joined by AND must all be allowed.
        let fine = licence.split(" OR ").flat_map(|part| part.split('/')).any(|choice| {
            choice
                .split(" AND ")
                .all(|one| LICENCES.contains(&one.trim_matches(|c| matches!(c, '(' | ')' | ' '))))
        });
        // Of the command alone, through what it draws with: as permissive.
        let of_the_command = (name, licence) == ("foldhash", "Zlib");
        assert!(fine || of_the_command, "{name}: {licence:?}");
    }
    assert!(seen > 20, "the dependencies were not listed");
}

#[test]
fn no_dependency_is_taken_in_any_version() {
    let metadata = metadata();
    let ours = metadata["packages"].as_array().unwrap().iter().filter(|package| package["source"].is_null());
    for dependency in ours.flat_map(|package| package["dependencies"].as_array().unwrap()) {
        let wild = dependency["req"] == "*" && dependency["path"].is_null();
        assert!(!wild, "{}", dependency["name"]);
    }
}
