//! Values that every SyncGuard client computes alike: vectors/keys.json comes from another
//! implementation.

// A test that fails panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use serde_json::Value;
use syncguard::{
    ErrorCode, LockError, MAX_KEY_LENGTH_BYTES, hash_key, make_fence_key, make_storage_key,
    normalize_and_validate_key,
};

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("{field} in {value}"))
}

fn number(value: &Value, field: &str) -> usize {
    usize::try_from(value[field].as_u64().expect("a number")).expect("a small one")
}

/// What the vectors say about one result: a text, or the code of an error.
fn check(result: Result<String, LockError>, expected: &Value, what: &str) -> Option<String> {
    match (result, expected["error"].as_str()) {
        (Ok(value), None) => {
            assert_eq!(Some(value.as_str()), expected.as_str(), "{what}");
            Some(value)
        }
        (Err(error), Some(code)) => {
            assert_eq!(error.code().as_str(), code, "{what}");
            None
        }
        (result, _) => panic!("{what}: {result:?} instead of {expected}"),
    }
}

#[test]
fn keys_hashes_and_storage_keys_agree_with_other_clients() {
    let vectors: Value = serde_json::from_str(include_str!("../vectors/keys.json")).expect("valid JSON");
    let keys = vectors["keys"].as_array().expect("a list");
    let (mut names, mut texts, mut errors) = (0, 0, 0);
    for entry in keys {
        let (name, key, nfc) = (text(entry, "name"), text(entry, "key"), text(entry, "nfc"));
        names += 1;
        assert_eq!(nfc.len(), number(entry, "nfc_bytes"), "{name}");
        assert_eq!(hash_key(key), text(entry, "hash"), "{name}");
        assert_eq!(hash_key(nfc), text(entry, "hash"), "{name}");
        if nfc.len() <= MAX_KEY_LENGTH_BYTES {
            assert_eq!(normalize_and_validate_key(key).expect(name), nfc);
        } else {
            assert_eq!(normalize_and_validate_key(key).unwrap_err().code(), ErrorCode::InvalidArgument);
        }
        for case in entry["storage"].as_array().expect("a list") {
            let (prefix, limit, reserve) =
                (text(case, "prefix"), number(case, "limit"), number(case, "reserve"));
            let what = format!("{name}, prefix of {} bytes, limit {limit}, reserve {reserve}", prefix.len());
            for form in [key, nfc] {
                let Some(base) = check(make_storage_key(prefix, form, limit, reserve), &case["base"], &what)
                else {
                    errors += 1;
                    continue;
                };
                texts += 1;
                assert!(base.len() + reserve <= limit, "{what}");
                let fence = make_fence_key(prefix, &base, limit, reserve);
                errors += usize::from(check(fence, &case["fence"], &what).is_none());
            }
        }
    }
    assert!(names >= 70 && texts >= 700 && errors >= 140, "{names} {texts} {errors}: the file was cut");
}

#[test]
fn colons_at_the_end_of_a_prefix_make_no_other_key() {
    let stored = |prefix: &str| make_storage_key(prefix, "k", 40, 0).unwrap();
    for (prefix, expected) in [
        ("", "k"),
        (":", "k"),
        ("::", "k"),
        ("p", "p:k"),
        ("p:", "p:k"),
        ("p::", "p:k"),
        (":p::", ":p:k"),
        ("a::b:", "a::b:k"),
    ] {
        assert_eq!(stored(prefix), expected, "{prefix:?}");
        let counter = make_fence_key(prefix, "k", 40, 0).unwrap();
        assert_eq!(counter, expected.strip_suffix('k').unwrap().to_owned() + "fence:k", "{prefix:?}");
    }
    // What is hashed, and whether there is room, follows the same rule.
    let long = "x".repeat(100);
    let hashed = make_storage_key("p", &long, 40, 0).unwrap();
    for prefix in ["p:", "p::", "p:::::::::::::::::::::::::::::::::::::::::::::::"] {
        assert_eq!(make_storage_key(prefix, &long, 40, 0).unwrap(), hashed);
    }
    assert_eq!(make_storage_key("::::", &long, 40, 0).unwrap(), make_storage_key("", &long, 40, 0).unwrap());
}

#[test]
fn an_empty_key_has_no_stored_form() {
    for prefix in ["", ":", "p"] {
        for refused in [make_storage_key(prefix, "", 1700, 0), make_fence_key(prefix, "", 1700, 0)] {
            assert_eq!(refused.unwrap_err().code(), ErrorCode::InvalidArgument, "{prefix:?}");
        }
    }
}
