//! Texts of errors say what to do next, in the words of Rust; here they become those of C.

/// What the library's texts advise, and what C has instead.
const PHRASES: [(&str, &str); 12] = [
    (
        "hand another to the builder's connect_with(config, tls), or give a connection string to connect with the feature `rustls`",
        "build the library with its feature rustls",
    ),
    (" (a TLS connector, with connect_with)", ""),
    ("with the builder's schema()", "in syncguard_client_options' schema"),
    ("the builder's ", "syncguard_client_options' "),
    ("see Operator::waiters() and pg_prepared_xacts", "see pg_stat_activity and pg_prepared_xacts"),
    ("call setup_schema() or run schema.sql", "connect without existing_tables_only, or run schema.sql"),
    ("move it to tokio::task::spawn_blocking or to a thread", "move it to a thread"),
    (" or hold fewer session locks", ""),
    (
        ", or call setup_schema() of a client that was built with create_members_table(true), and check members_table_name",
        ", and check syncguard_client_options' members_table_name",
    ),
    (" unless it is released by its lock id", ""),
    ("raise timeout", "raise timeout_ms"),
    (
        "the transaction with complete_in",
        "the transaction with the statements of syncguard_run_completion_sql",
    ),
];

/// Names of options and calls.
const WORDS: [(&str, &str); 8] = [
    ("operation_timeout", "operation_timeout_ms"),
    ("connection_timeout", "connection_timeout_ms"),
    ("max_hold", "max_hold_ms"),
    ("min_hold", "min_hold_ms"),
    ("claim_at_start", "SYNCGUARD_CLAIM_AT_START"),
    ("complete_in", "syncguard_run_completion_sql"),
    ("run_once", "syncguard_run_once"),
    ("auto_create_tables", "existing_tables_only"),
];

/// A text of the library as C programs should read it.
#[must_use]
pub fn in_c(text: &str) -> String {
    let text = PHRASES.iter().fold(text.to_owned(), |text, (rust, c)| text.replace(rust, c));
    let in_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut told = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(from) = rest.find(in_word) {
        let (before, at) = rest.split_at(from);
        let (word, after) = at.split_at(at.find(|letter| !in_word(letter)).unwrap_or(at.len()));
        told.push_str(before);
        told.push_str(WORDS.iter().find(|(rust, _)| *rust == word).map_or(word, |(_, c)| c));
        rest = after;
    }
    told + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_replaced_as_whole_words_and_all_else_stays() {
        assert_eq!(in_c("raise operation_timeout."), "raise operation_timeout_ms.");
        for text in ["operation_timeout_ms", "my_max_hold", "Ω: größer → 5 s", "", "a(b) c"] {
            assert_eq!(in_c(text), text);
        }
    }
}
