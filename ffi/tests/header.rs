//! The header and the library say the same: every function with its types, every number, and what
//! the header promises for NULL.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char};
use std::ptr::{dangling_mut, null, null_mut};

use syncguard::ErrorCode;
use syncguard_ffi::*;

const HEADER: &str = include_str!("../include/syncguard.h");
const SOURCE: &str = include_str!("../src/lib.rs");

/// The header without comments, and with single spaces.
fn header() -> String {
    let mut rest = HEADER;
    let mut code = String::new();
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    code + rest
}

fn squeeze(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn c_type(rust: &str) -> String {
    if let Some(target) = rust.strip_prefix("*const ") {
        return format!("const {}*", c_type(target));
    }
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{}*", c_type(target));
    }
    match rust {
        "i32" => "int32_t ".into(),
        "u64" => "uint64_t ".into(),
        "c_char" => "char ".into(),
        "()" => "void ".into(),
        handle if handle.starts_with("syncguard_") => format!("{handle} "),
        other => panic!("no C type is known for {other}"),
    }
}

fn functions_of_the_library() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for part in SOURCE.split("extern \"C\" fn ").skip(1) {
        let signature = part.split_once('{').map_or(part, |(before, _)| before);
        let (name, rest) = signature.split_once('(').unwrap_or_default();
        let (parameters, result) = rest.split_once(')').unwrap_or_default();
        let result = squeeze(result.trim().trim_start_matches("->"));
        let result = c_type(if result.is_empty() { "()" } else { &result });
        let parameters: Vec<_> = parameters
            .split(',')
            .filter_map(|parameter| parameter.trim().split_once(": "))
            .map(|(name, rust)| c_type(rust) + name)
            .collect();
        let parameters = if parameters.is_empty() { "void".into() } else { parameters.join(", ") };
        found.insert(format!("{result}{name}({parameters});"));
    }
    found
}

fn functions_of_the_header() -> BTreeSet<String> {
    let code = header();
    let lines = code.lines().map(str::trim).filter(|line| line.ends_with(");"));
    lines.map(squeeze).collect()
}

#[test]
fn every_function_has_the_same_types_on_both_sides() {
    let functions = functions_of_the_library();
    assert!(functions.len() >= 14, "{functions:?}");
    assert_eq!(functions, functions_of_the_header());
}

#[test]
fn every_number_is_the_same_on_both_sides() {
    let in_header: BTreeMap<String, String> = header()
        .lines()
        .filter_map(|line| line.strip_prefix("#define SYNCGUARD_")?.trim().split_once(' '))
        .map(|(name, value)| {
            (name.into(), value.trim().trim_matches(['(', ')']).replace("UINT64_MAX", "u64::MAX"))
        })
        .collect();
    let in_library: BTreeMap<String, String> = SOURCE
        .lines()
        .filter_map(|line| line.strip_prefix("pub const SYNCGUARD_")?.strip_suffix(';')?.split_once(": "))
        .filter_map(|(name, rest)| Some((name.into(), rest.split_once(" = ")?.1.into())))
        .collect();
    assert!(in_library.len() >= 13, "{in_library:?}");
    assert_eq!(in_header, in_library);
}

fn string(pointer: *const c_char) -> String {
    // SAFETY: the functions that return text promise a zero byte at its end.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[test]
fn every_code_has_its_own_number_and_the_librarys_name() {
    let codes = [
        ErrorCode::ServiceUnavailable,
        ErrorCode::AuthFailed,
        ErrorCode::InvalidArgument,
        ErrorCode::RateLimited,
        ErrorCode::NetworkTimeout,
        ErrorCode::AcquisitionTimeout,
        ErrorCode::Aborted,
        ErrorCode::Internal,
    ];
    for code in codes {
        assert_eq!(string(syncguard_code_name(number_of(code))), code.as_str());
    }
    let numbers: BTreeSet<_> = codes.into_iter().map(number_of).collect();
    assert_eq!(numbers.len(), codes.len());
    assert_eq!(string(syncguard_code_name(99)), "unknown");
}

#[test]
fn null_is_answered_and_never_followed() {
    let key = CString::new("key").expect("no zero byte in it");
    let mut guard: *mut syncguard_guard = dangling_mut();
    let mut client: *mut syncguard_client = dangling_mut();
    // SAFETY: NULL is allowed everywhere, and what is not NULL is valid.
    unsafe {
        assert_eq!(syncguard_client_connect(null(), null(), &raw mut client), SYNCGUARD_INVALID_ARGUMENT);
        assert!(client.is_null(), "the out parameter is cleared");
        assert_eq!(syncguard_client_connect(key.as_ptr(), null(), null_mut()), SYNCGUARD_INVALID_ARGUMENT);
        assert_eq!(syncguard_client_close(null(), 1), SYNCGUARD_INVALID_ARGUMENT);
        assert_eq!(syncguard_lock(null(), key.as_ptr(), 0, 0, &raw mut guard), SYNCGUARD_INVALID_ARGUMENT);
        assert!(guard.is_null(), "the out parameter is cleared");
        assert_eq!(string(syncguard_last_error()), "client is NULL");
        assert_eq!(syncguard_try_lock(null(), null(), 0, null_mut()), SYNCGUARD_INVALID_ARGUMENT);
        assert_eq!(syncguard_guard_fence(null()), 0);
        assert_eq!(syncguard_guard_is_held(null()), 0);
        assert_eq!(syncguard_guard_remaining_ms(null()), 0);
        assert_eq!(syncguard_guard_wait_lost(null(), 1), SYNCGUARD_INVALID_ARGUMENT);
        assert_eq!(syncguard_guard_extend(null(), 1), SYNCGUARD_INVALID_ARGUMENT);
        assert_eq!(syncguard_guard_release(null()), SYNCGUARD_INVALID_ARGUMENT);
        syncguard_guard_free(null_mut());
        syncguard_client_free(null_mut());
    }
}

#[test]
fn text_that_is_not_utf_8_is_refused_and_an_error_belongs_to_its_thread() {
    let bytes = CString::new([0xff_u8]).expect("no zero byte in it");
    let mut client = null_mut();
    // SAFETY: text with a zero byte at its end, and a variable of ours.
    let code = unsafe { syncguard_client_connect(bytes.as_ptr(), null(), &raw mut client) };
    assert_eq!(code, SYNCGUARD_INVALID_ARGUMENT);
    assert_eq!(string(syncguard_last_error()), "url is not UTF-8");
    let elsewhere = std::thread::spawn(|| string(syncguard_last_error())).join();
    assert_eq!(elsewhere.ok().as_deref(), Some(""));
}
