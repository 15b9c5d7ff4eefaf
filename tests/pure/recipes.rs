//! The page of recipes has the code that `tests/recipes/` runs, word for word, and nothing that is not run.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says by a panic what it did not expect")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::source::walk;

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What stands between the two comments of a file, with the name of its recipe.
fn recipe(text: &str) -> Option<(&str, &str)> {
    let (_, rest) = text.split_once(" recipe: ")?;
    let (name, rest) = rest.split_once('\n')?;
    let end = ["\n// end", "\n/* end", "\n# end"].iter().filter_map(|end| rest.find(end)).min()?;
    Some((name.trim_end_matches(" */"), rest.get(..=end)?))
}

/// The blocks of Rust, C and Python below each heading of the page.
fn blocks(page: &str) -> BTreeMap<&str, Vec<String>> {
    let (mut found, mut heading, mut block) = (BTreeMap::<_, Vec<String>>::new(), "", None::<String>);
    for line in page.lines() {
        if let Some(mut open) = block.take() {
            if line == "```" {
                found.entry(heading).or_default().push(open);
            } else {
                open.push_str(line);
                open.push('\n');
                block = Some(open);
            }
        } else if let Some(name) = line.strip_prefix("## ") {
            heading = name;
            found.entry(heading).or_default();
        } else if ["```rust,no_run", "```c", "```python"].contains(&line) {
            block = Some(String::new());
        }
    }
    found
}

#[test]
fn every_recipe_on_the_page_is_what_is_run_and_every_one_that_is_run_is_there() {
    let page = fs::read_to_string(top().join("docs/recipes.md")).expect("the page of recipes");
    let mut run = BTreeMap::new();
    walk(&top().join("tests/recipes"), &mut |path| {
        let text = fs::read_to_string(path).expect("a recipe is text");
        if let Some((name, code)) = recipe(&text) {
            // Those in other languages are run by the file beside them.
            let test = fs::read_to_string(path.with_extension("rs")).expect("it has a test");
            assert!(test.contains("#[test]"), "{} is not run", path.display());
            let before = run.insert(name.to_owned(), vec![code.to_owned()]);
            assert!(before.is_none(), "two recipes have the name {name}");
        }
    });
    assert!(run.len() >= 16, "recipes were not found: {:?}", run.keys());
    let shown = blocks(&page).into_iter().map(|(name, blocks)| (name.to_owned(), blocks)).collect();
    assert_eq!(run, shown, "left what is run, right what docs/recipes.md shows");
}

#[test]
fn a_recipe_that_was_changed_in_one_place_is_found() {
    let file = "//! A file.\n\n// recipe: One thing\nuse a;\n\nfn b() {}\n// end\n\n#[test]\nfn c() {}\n";
    assert_eq!(recipe(file), Some(("One thing", "use a;\n\nfn b() {}\n")));
    assert_eq!(recipe("/* recipe: In C */\nint a;\n/* end */\n"), Some(("In C", "int a;\n")));
    assert_eq!(recipe("fn main() {}\n"), None);
    let page = "# Recipes\n\n## One thing\n\nText.\n\n```rust,no_run\nuse a;\n\nfn b() {}\n```\n\n```ini\nx = 1\n```\n\n## Another\n";
    let found = blocks(page);
    assert_eq!(found.get("One thing"), Some(&vec!["use a;\n\nfn b() {}\n".to_owned()]));
    assert_eq!(
        found.get("Another"),
        Some(&Vec::new()),
        "a recipe without code differs from every one that is run"
    );
}
