//! The measured part of a page: written by a run, never by hand.

use std::fs;

/// Puts the lines between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
pub fn write(path: &str, name: &str, lines: &[String]) {
    let page = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    fs::write(path, with(&page, name, lines)).unwrap_or_else(|error| panic!("{path}: {error}"));
}

fn with(page: &str, name: &str, lines: &[String]) -> String {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->"));
    let (before, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("no line {begin}"));
    let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("no line {end}"));
    format!("{before}{begin}\n{}\n\n{end}{after}", lines.join("\n"))
}

#[test]
fn what_is_between_the_marks_is_replaced() {
    let page = "a\n<!-- run: begin -->\nold\n<!-- run: end -->\nb\n";
    let new = with(page, "run", &["1".to_owned(), "2".to_owned()]);
    assert_eq!(new, "a\n<!-- run: begin -->\n\n1\n2\n\n<!-- run: end -->\nb\n");
}
