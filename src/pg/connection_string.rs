//! Reading a connection string. Errors never repeat it: a password that was not escaped is cut into
//! parts, any of which the driver may take for something else.

use std::error::Error;
use std::str::FromStr;

use postgres::Config;

use crate::error::{LockError, Result};

/// Options of libpq, of poolers and of other drivers that ours does not have. Only what is in this
/// list is named in an error.
const ELSEWHERE: &[(&str, &str)] = &[
    ("sslrootcert", CERTIFICATES),
    ("sslcert", CERTIFICATES),
    ("sslkey", CERTIFICATES),
    ("sslpassword", CERTIFICATES),
    ("sslcrl", CERTIFICATES),
    ("sslcrldir", CERTIFICATES),
    ("sslcertmode", CERTIFICATES),
    ("sslsni", CERTIFICATES),
    ("ssl_min_protocol_version", CERTIFICATES),
    ("ssl_max_protocol_version", CERTIFICATES),
    ("passfile", "read the password yourself, and give it as password"),
    ("service", "give the service's settings themselves"),
    ("client_encoding", LEAVE_OUT),
    ("fallback_application_name", "use application_name"),
    ("gssencmode", LEAVE_OUT),
    ("gssdelegation", LEAVE_OUT),
    ("gsslib", LEAVE_OUT),
    ("krbsrvname", LEAVE_OUT),
    ("keepalives_count", "use keepalives_retries"),
    ("replication", LEAVE_OUT),
    ("require_auth", LEAVE_OUT),
    ("requirepeer", LEAVE_OUT),
    ("requiressl", "use sslmode=require"),
    ("ssl", "use sslmode=require"),
    ("sslcompression", LEAVE_OUT),
    ("connection_limit", "use the builder's max_connections"),
    ("pool_max_conns", "use the builder's max_connections"),
    ("pool_timeout", "use the builder's connection_timeout"),
    ("pgbouncer", LEAVE_OUT),
    ("prepareThreshold", LEAVE_OUT),
    ("statement_cache_capacity", LEAVE_OUT),
    ("schema", "use the builder's schema"),
    ("currentSchema", "use the builder's schema"),
    ("search_path", "use the builder's schema, or options=-csearch_path%3Dname"),
    ("statement_timeout", "use the builder's operation_timeout"),
    ("lock_timeout", "use the builder's operation_timeout"),
    ("username", "use user"),
    ("database", "use dbname"),
    ("hostname", "use host"),
];

const CERTIFICATES: &str = "give certificates to the TLS connector of the builder's connect_with";
const LEAVE_OUT: &str = "leave it out";

/// Parses a connection string; the error does not repeat it.
pub(crate) fn parse_url(url: &str) -> Result<Config> {
    check_at_signs(url)?;
    let config = Config::from_str(url).map_err(|error| {
        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        LockError::invalid(format!("the connection string cannot be read: {}", advice(&cause)))
    })?;
    if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
        return Err(LockError::invalid(
            "the connection string names no host: add host=… (a path for a Unix socket)",
        ));
    }
    Ok(config)
}

/// A second `@` before the path of a URL: the driver would take what is between the two for a host.
fn check_at_signs(url: &str) -> Result<()> {
    let Some(rest) = ["postgres://", "postgresql://"].iter().find_map(|scheme| url.strip_prefix(scheme))
    else {
        return Ok(());
    };
    let after_user = rest.split_once('@').map_or("", |(_, rest)| rest);
    let hosts = after_user.split(['/', '?']).next().unwrap_or_default();
    if hosts.contains('@') {
        return Err(LockError::invalid(
            "the connection string has more than one @ before the host: write one in a user or a password as %40 (and : as %3A, / as %2F, % as %25)",
        ));
    }
    Ok(())
}

/// What to do about the driver's complaint, of which nothing is repeated that came from the string.
fn advice(cause: &str) -> String {
    if let Some(name) = cause.strip_prefix("unknown option `").and_then(|rest| rest.strip_suffix('`')) {
        return match ELSEWHERE.iter().find(|(known, _)| *known == name) {
            Some((known, instead)) => format!("the option {known} is not known here: {instead}"),
            None => "it has an option that is not known: see the driver's list at https://docs.rs/postgres/latest/postgres/config/struct.Config.html".to_owned(),
        };
    }
    if cause == "invalid value for option `sslmode`" {
        return "sslmode is disable, prefer or require here: with require the TLS connector of the builder's connect_with decides what is verified, and usual connectors verify as verify-full does unless told otherwise".to_owned();
    }
    if cause == "invalid value for option `target_session_attrs`" {
        return "target_session_attrs is any, read-write or read-only here: read-write stands for primary"
            .to_owned();
    }
    // The driver names only options of its own here.
    let hint =
        if cause.starts_with("invalid value for option") { format!("{cause}: ") } else { String::new() };
    format!("{hint}use postgresql://user@host:port/database or key=value pairs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn refused(url: &str) -> String {
        let error = parse_url(url).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        let text = format!("{error} {error:?} {}", error.chain());
        assert!(!text.contains("MARKER"), "{text}");
        text
    }

    #[test]
    fn an_option_of_libpq_is_named_and_no_value_is() {
        let text = refused("postgresql://u:MARKER@h/d?sslrootcert=/MARKER.pem");
        assert!(text.contains("sslrootcert") && text.contains("connect_with"), "{text}");
        let text = refused("host=h keepalives_count=MARKER");
        assert!(text.contains("keepalives_count") && text.contains("keepalives_retries"), "{text}");
    }

    #[test]
    fn an_option_that_may_be_a_part_of_a_password_is_not_named() {
        let text = refused("postgresql://u:p@h/d?MARKER=1");
        assert!(text.contains("an option that is not known"), "{text}");
        refused("host=h password=a MARKER=b");
    }

    #[test]
    fn an_at_sign_that_is_not_escaped_is_pointed_out() {
        for url in ["postgresql://u:MARKER@MARKER@h/d", "postgres://u:MARKER@MARKER:1@h:5432"] {
            let text = refused(url);
            assert!(text.contains("%40"), "{text}");
        }
        for url in ["postgresql://u:p%40q@h/d", "postgresql://u@h/d?options=a@b", "host=h password=a@b@c"] {
            parse_url(url).unwrap();
        }
    }

    #[test]
    fn a_mode_of_verification_is_explained() {
        for mode in ["verify-full", "verify-ca"] {
            let text = refused(&format!("host=h sslmode={mode}"));
            assert!(text.contains("verify-full does"), "{text}");
        }
    }

    #[test]
    fn the_role_of_a_server_is_explained() {
        let text = refused("host=a,b target_session_attrs=primary");
        assert!(text.contains("read-write stands for primary"), "{text}");
    }
}
