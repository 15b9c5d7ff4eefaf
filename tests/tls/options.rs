//! Every option of libpq is taken, refused by name, or ignored, as docs/connecting.md says.

use syncguard::{ErrorCode, PgLockClient};

/// The options of PostgreSQL 18's libpq, each with a value that it takes.
const OPTIONS: [(&str, &str); 53] = [
    ("host", "db.example"),
    ("hostaddr", "127.0.0.1"),
    ("port", "5432"),
    ("dbname", "d"),
    ("user", "u"),
    ("password", "p"),
    ("passfile", "/nowhere"),
    ("require_auth", "scram-sha-256"),
    ("channel_binding", "prefer"),
    ("connect_timeout", "10"),
    ("client_encoding", "UTF8"),
    ("options", "-cwork_mem=4MB"),
    ("application_name", "a"),
    ("fallback_application_name", "a"),
    ("keepalives", "1"),
    ("keepalives_idle", "10"),
    ("keepalives_interval", "10"),
    ("keepalives_count", "3"),
    ("tcp_user_timeout", "10"),
    ("replication", "database"),
    ("gssencmode", "prefer"),
    ("sslmode", "disable"),
    ("requiressl", "1"),
    ("ssl", "true"),
    ("sslnegotiation", "postgres"),
    ("sslcompression", "0"),
    ("sslcert", "/nowhere.crt"),
    ("sslkey", "/nowhere.key"),
    ("sslkeylogfile", "/nowhere"),
    ("sslpassword", "p"),
    ("sslcertmode", "allow"),
    ("sslrootcert", "/nowhere"),
    ("sslcrl", "/nowhere"),
    ("sslcrldir", "/nowhere"),
    ("sslsni", "1"),
    ("requirepeer", "postgres"),
    ("ssl_min_protocol_version", "TLSv1.2"),
    ("ssl_max_protocol_version", "TLSv1.3"),
    ("min_protocol_version", "3.0"),
    ("max_protocol_version", "3.2"),
    ("krbsrvname", "postgres"),
    ("gsslib", "gssapi"),
    ("gssdelegation", "1"),
    ("scram_client_key", "k"),
    ("scram_server_key", "k"),
    ("service", "s"),
    ("servicefile", "/nowhere"),
    ("target_session_attrs", "read-write"),
    ("load_balance_hosts", "random"),
    ("oauth_issuer", "https://i.example"),
    ("oauth_client_id", "c"),
    ("oauth_client_secret", "s"),
    ("oauth_scope", "s"),
];

/// What the page says of each option, in its order.
fn page() -> Vec<(&'static str, &'static str)> {
    let page = include_str!("../../docs/connecting.md");
    let table = page.split("## Every option").nth(1).expect("the page has the table");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    rows.map(|(name, rest)| (name, rest.split(' ').next().unwrap_or_default())).collect()
}

#[test]
fn the_page_says_of_every_option_what_becomes_of_it() {
    let page = page();
    let names: Vec<_> = page.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, OPTIONS.map(|(name, _)| name));
    for ((name, said), (_, value)) in page.iter().zip(OPTIONS) {
        let text = match *name {
            // Without it there is nothing that the files could be for.
            "sslmode" | "ssl" => format!("host=/socket {name}={value}"),
            "sslcert" => format!("host=h sslmode=disable sslkey=/nowhere.key {name}={value}"),
            _ => format!("host=h sslmode=disable {name}={value}"),
        };
        let connected = PgLockClient::builder().auto_create_tables(false).connect(&text);
        match (*said, connected) {
            ("taken" | "ignored", Ok(_)) => {}
            ("refused", Err(error)) => {
                assert_eq!(error.code(), ErrorCode::InvalidArgument, "{name}");
                assert!(error.to_string().contains(name), "{name}: {error}");
            }
            (said, connected) => panic!("{name} is {said}, they say: {connected:?}"),
        }
    }
}
