//! Codes, texts and causes, for what the driver and its errors say.

use super::*;
use ErrorCode::{AuthFailed, Internal, InvalidArgument, NetworkTimeout, RateLimited, ServiceUnavailable};

#[test]
fn every_class_of_sqlstate_has_its_code() {
    let table: &[(&[&str], ErrorCode)] = &[
        (
            &[
                "08000", "08003", "08006", "08001", "08004", "25006", "25P03", "53000", "53100", "53200",
                "57P01", "57P02", "57P03", "57P04", "57P05", "40001", "40P01", "40003", "58030",
            ],
            ServiceUnavailable,
        ),
        (&["53300"], RateLimited),
        (&["28000", "28P01", "42501"], AuthFailed),
        (
            &[
                "22000", "22001", "22003", "22021", "22P02", "22P05", "23000", "23502", "23505", "23514",
                "3D000", "3F000", "42P01", "42P10", "42703", "42883", "54000", "55000",
            ],
            InvalidArgument,
        ),
        (&["25P04", "55P03", "57014"], NetworkTimeout),
        (&["XX000", "XX001", "0A000", "42601", "25P02", "99999", "", "é"], Internal),
    ];
    for (states, code) in table {
        for state in *states {
            assert_eq!(code_for(state), *code, "{state}");
        }
    }
}

#[test]
fn every_text_says_what_to_do() {
    let states = [
        "42P10", "55000", "54000", "22001", "23514", "P0001", "42P01", "3F000", "3D000", "42501", "25006",
        "40001", "55P03", "57014", "53100", "53300", "25P03", "57P01", "58030", "28P01", "22021", "XX000",
    ];
    for state in states {
        let text = hint(state, code_for(state));
        assert!(text.contains(": "), "{state}: {text}");
    }
}

#[test]
fn a_server_that_stops_before_a_wraparound_is_told_from_a_wrong_argument() {
    let text = hint("54000", code_for("54000"));
    for word in ["wraparound", "VACUUM", "pg_prepared_xacts"] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn no_text_has_the_name_of_a_role_and_none_of_a_pool_a_detail() {
    let text = without_names("FATAL: password authentication failed for user \"MARKER\"");
    assert_eq!(text, "FATAL: password authentication failed for user \"…\"");
    let text = without_names("FATAL: role \"MARKER\" is not permitted to log in");
    assert_eq!(text, "FATAL: role \"…\" is not permitted to log in");
    let cause = PoolError::new("ERROR: it is there\nDETAIL: Key (key)=(MARKER) already exists.");
    let error = LockError::new(Internal).with_source(cause);
    for text in [format!("{error:?}"), error.chain().to_string()] {
        assert!(text.contains("it is there") && !text.contains("MARKER"), "{text}");
    }
}

#[test]
fn texts_that_may_repeat_a_key_are_withheld() {
    for state in ["22021", "23505", "42601", "XX000", "54000"] {
        assert!(quotes_values(state), "{state}");
    }
    for state in ["57P01", "40P01", "42P01", "55P03", "28P01"] {
        assert!(!quotes_values(state), "{state}");
    }
}

#[test]
fn a_refusal_with_a_cure_of_its_own_says_it() {
    let cures: &[(&[&str], &str)] = &[
        (&["42P01", "42703"], "setup_schema()"),
        (&["3F000"], "the schema does not exist"),
        (&["3D000"], "the database does not exist"),
        (&["42501"], "grants in docs/security.md"),
        (&["42P10"], "add the primary keys"),
        (&["55000"], "DEFERRABLE"),
        (&["54000"], "wraparound"),
        (&["22001"], "too short"),
        (&["23502", "23503", "23505", "23514", "23P01"], "drop it from them"),
        (&["P0001"], "user-defined trigger"),
        (&["25006"], "connect to the primary"),
        (&["40001", "40P01"], "lost against another"),
        (&["55P03"], "another session holds a lock"),
        (&["57014"], "cancelled the statement"),
        (&["53100"], "disk is full"),
        (&["53300"], "raise max_connections"),
        (&["25P03", "25P04", "57P05"], "own time limit"),
        (&["57P01", "57P02", "57P03", "57P04"], "shutting down, starting up"),
        (&["58030", "53200"], "cannot serve this now"),
        (&["28P01"], "user, password and pg_hba.conf"),
        (&["22021"], "key and database encoding"),
        (&["XX000"], "unexpected error"),
    ];
    for (states, cure) in cures {
        for state in *states {
            let text = hint(state, code_for(state));
            assert!(text.contains(cure), "{state}: {text}");
        }
    }
}

/// What can go wrong with one of several hosts, from what says least to what says most, and whether to wait for it.
fn from_least_telling() -> Vec<(LockError, bool)> {
    let answer = |code: ErrorCode, state: &str| LockError::new(code).with_sqlstate(state);
    let of_io = |cause: io::Error| LockError::new(ServiceUnavailable).with_source(cause);
    let wrapped = |cause: io::Error| of_io(io::Error::other(LockError::new(Internal).with_source(cause)));
    vec![
        (LockError::new(NetworkTimeout), false),
        (LockError::new(ServiceUnavailable), true),
        // A socket that this account may not open, which is no server's answer.
        (of_io(io::Error::from_raw_os_error(rustix::io::Errno::ACCESS.raw_os_error())), true),
        (of_io(io::ErrorKind::ConnectionRefused.into()), true),
        (LockError::new(AuthFailed), false),
        (answer(AuthFailed, "28P01"), false),
        (answer(ServiceUnavailable, "57P03"), true),
        (of_io(io::ErrorKind::PermissionDenied.into()), true),
        (wrapped(io::ErrorKind::PermissionDenied.into()), true),
    ]
}

#[test]
fn a_standby_says_more_than_a_refusal_and_that_more_than_silence() {
    let ranks: Vec<_> = from_least_telling().iter().map(|(error, _)| telling(error)).collect();
    assert_eq!(ranks, [0, 1, 1, 1, 1, 2, 2, 3, 3]);
    for (error, soon) in from_least_telling() {
        assert_eq!(may_become_primary(&error), soon, "{error:?}");
        assert_eq!(is_answer(&error), telling(&error) >= 2, "{error:?}");
    }
}

#[test]
fn of_several_hosts_the_most_telling_is_named_and_of_equal_ones_the_last() {
    let named = |names: &[(&'static str, Option<&str>)]| {
        let mut failed = NoCandidate::default();
        for (name, state) in names {
            let error = LockError::new(ServiceUnavailable).with_message(*name);
            failed.add(state.iter().fold(error, |error, state| error.with_sqlstate(state)));
        }
        failed.into_error().to_string()
    };
    assert_eq!(named(&[("a", None), ("b", None)]), "b");
    assert_eq!(named(&[("a", Some("57P03")), ("b", None)]), "a");
    assert_eq!(named(&[("a", None), ("b", Some("57P03"))]), "b");
    assert!(named(&[]).contains("no host has an address"));
}

#[test]
fn a_failure_without_an_answer_is_told_apart_by_the_drivers_text() {
    for (text, why, code, said) in [
        ("authentication error", "channel binding not used", AuthFailed, "channel_binding=require"),
        ("authentication error", "unsupported", AuthFailed, "check user and password"),
        ("invalid configuration", "password missing", AuthFailed, "passfile"),
        ("invalid configuration", "", InvalidArgument, "are not valid"),
        ("invalid connection string: x", "", InvalidArgument, "are not valid"),
        ("error performing TLS handshake", "no certificate", ServiceUnavailable, "failed (no certificate)"),
        ("unexpected message from server", "", Internal, "PostgreSQL would not send"),
        ("error parsing response from server", "", Internal, "PostgreSQL would not send"),
        ("connection closed", "channel binding", ServiceUnavailable, "connection to the server is closed"),
    ] {
        let (found, message) = without_io(text, why);
        assert_eq!(found, code, "{text}: {why}");
        assert!(message.contains(said), "{text}: {why}: {message}");
    }
}

#[test]
fn whoever_asks_for_a_standby_is_told_so() {
    let text = |said: &str| other_attributes(&io::Error::new(io::ErrorKind::PermissionDenied, said));
    assert!(text("database is not read only").contains("target_session_attrs=read-only"));
    assert!(text("database does not allow writes").contains("a failover may be under way"));
    assert!(refused_certificate("alert: bad").contains("(alert: bad): check the client's certificate"));
}

#[test]
fn a_missing_right_is_explained_by_the_call_that_needs_it() {
    let error = |state: &str| {
        let error = LockError::new(AuthFailed).with_message("all").with_sqlstate(state);
        without_right(error, "this one").to_string()
    };
    assert_eq!([error("42501"), error("28000")], ["this one", "all"]);
    let late = out_of_time();
    assert_eq!(late.code(), NetworkTimeout);
    assert!(late.to_string().contains("before it could be sent"), "{late}");
}
