//! This crate without a TLS library: what asks for TLS is refused, and says what to do.

use syncguard::{ErrorCode, PgLockClient};

use crate::support::{logs, server};

#[test]
fn what_asks_for_tls_is_refused_and_names_the_feature() {
    for asks in [
        "sslmode=require",
        "sslmode=verify-ca&sslrootcert=/ca.pem",
        "sslmode=verify-full&sslrootcert=/ca.pem",
        "sslrootcert=system",
        "sslrootcert=/ca.pem",
        "ssl=true",
    ] {
        let error = PgLockClient::connect(&format!("{}?{asks}", server().url())).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{asks}");
        assert!(error.to_string().contains("feature `rustls`"), "{asks}: {error}");
    }
}

#[test]
fn what_does_not_is_not_encrypted() {
    let mark = logs::exclusive();
    for fine in ["sslmode=disable", "sslmode=prefer", "application_name=a"] {
        PgLockClient::connect(&format!("{}?{fine}", server().url())).unwrap();
    }
    let told = mark.lines().into_iter().filter(|line| line.text.contains("built without TLS")).count();
    assert_eq!(told, 2, "{:#?}", mark.lines());
    let socket = format!("{}?sslmode=require", server().socket_url());
    PgLockClient::connect(&socket).expect("sslmode is about TCP");
}
