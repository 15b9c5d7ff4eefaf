//! The header and the library say the same: every function with its types, every struct with its fields, every
//! number, and what the header promises for NULL. Compilers take the header as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char};
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{dangling_mut, null, null_mut};
use std::{env, fs};

use syncguard::ErrorCode;
use syncguard_ffi::*;

const HEADER: &str = include_str!("../include/syncguard.h");

/// All of `src/`.
fn source() -> String {
    let mut files: Vec<_> = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))
        .expect("the sources are there")
        .map(|file| file.expect("it can be read").path())
        .collect();
    files.sort();
    files.iter().map(|file| fs::read_to_string(file).expect("it can be read")).collect()
}

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
        let to_pointer = target.starts_with('*');
        return if to_pointer {
            format!("{}const *", c_type(target))
        } else {
            format!("const {}*", c_type(target))
        };
    }
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{}*", c_type(target));
    }
    match rust {
        "i32" => "int32_t ".into(),
        "i64" => "int64_t ".into(),
        "u32" => "uint32_t ".into(),
        "u64" => "uint64_t ".into(),
        "usize" => "size_t ".into(),
        "c_char" => "char ".into(),
        "()" | "c_void" => "void ".into(),
        handle if handle.starts_with("syncguard_") => format!("{handle} "),
        other => panic!("no C type is known for {other}"),
    }
}

fn functions_of_the_library() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for part in source().split("extern \"C\" fn ").skip(1) {
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
    lines.filter(|line| !line.starts_with("typedef")).map(squeeze).collect()
}

#[test]
fn every_function_has_the_same_types_on_both_sides() {
    let functions = functions_of_the_library();
    assert!(functions.len() >= 55, "{functions:?}");
    assert_eq!(functions, functions_of_the_header());
}

#[test]
fn every_number_is_the_same_on_both_sides() {
    let in_header: BTreeMap<String, String> = header()
        .lines()
        .filter_map(|line| line.strip_prefix("#define SYNCGUARD_")?.trim().split_once(' '))
        .filter(|(name, _)| !name.starts_with("VERSION"))
        .map(|(name, value)| {
            (name.into(), value.trim().trim_matches(['(', ')']).replace("UINT64_MAX", "u64::MAX"))
        })
        .collect();
    let in_library: BTreeMap<String, String> = source()
        .lines()
        .filter_map(|line| line.strip_prefix("pub const SYNCGUARD_")?.strip_suffix(';')?.split_once(": "))
        .filter_map(|(name, rest)| Some((name.into(), rest.split_once(" = ")?.1.into())))
        .collect();
    assert!(in_library.len() >= 19, "{in_library:?}");
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

fn callbacks_of_the_library() -> BTreeSet<String> {
    let text = squeeze(&source());
    let types =
        text.split("pub type ").skip(1).filter_map(|part| part.split_once(';')).map(|(of, _)| of.trim());
    let of = |text: &str| {
        let (name, rest) = text.split_once(" = Option<unsafe extern \"C-unwind\" fn(")?;
        let (parameters, result) = rest.trim_end_matches('>').rsplit_once(')')?;
        let result = result.trim().trim_start_matches("-> ");
        let result = c_type(if result.is_empty() { "()" } else { result });
        let parameters: Vec<_> = parameters
            .split(',')
            .filter_map(|parameter| parameter.trim().split_once(": "))
            .map(|(name, rust)| c_type(rust) + name)
            .collect();
        Some(format!("typedef {result}(*{name})({});", parameters.join(", ")))
    };
    types.filter_map(of).collect()
}

#[test]
fn every_callback_has_the_same_types_on_both_sides() {
    let code = header();
    let in_header: BTreeSet<String> = code
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with("typedef") && line.ends_with(");"))
        .map(squeeze)
        .collect();
    assert_eq!(in_header.len(), 3, "{in_header:?}");
    assert_eq!(in_header, callbacks_of_the_library());
}

fn scratch(name: &str) -> PathBuf {
    let dir = env::temp_dir().join(format!("syncguard-header-{}-{name}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory can be made");
    dir
}

fn compile(compiler: &str, flags: &[&str], file: &Path, program: &Path) {
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let output = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Wshadow", "-pedantic", "-Werror", "-I", include])
        .args(flags)
        .arg(file)
        .arg("-o")
        .arg(program)
        .output()
        .expect("compilers for C and C++ are installed");
    assert!(output.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_standard_of_c_and_cpp_takes_the_header_without_a_warning() {
    let dir = scratch("standards");
    let text = "#include \"syncguard.h\"\n#include \"syncguard.h\"\nint main(void) { return 0; }\n";
    for (compiler, file, standards) in [
        ("cc", "program.c", &["c99", "c11", "c17", "gnu17"][..]),
        ("c++", "program.cpp", &["c++11", "c++14", "c++17", "c++20"][..]),
    ] {
        let file = dir.join(file);
        fs::write(&file, text).expect("it can be written");
        for standard in standards {
            compile(compiler, &[&format!("-std={standard}")], &file, &dir.join("program"));
        }
    }
    fs::remove_dir_all(dir).expect("it can be removed");
}

#[test]
fn every_field_stands_at_the_same_place_on_both_sides() {
    macro_rules! fields {
        ($($of:ident: $($field:ident)*;)*) => {
            vec![$((stringify!($of), "", size_of::<$of>()), $((stringify!($of), stringify!($field), offset_of!($of, $field)),)*)*]
        };
    }
    let fields = fields! {
        syncguard_options: ttl_ms timeout_ms min_hold_ms max_hold_ms token note fair priority reserved;
        syncguard_client_options: schema table_name fence_table_name connection_timeout_ms operation_timeout_ms
            max_connections existing_tables_only members_table_name owner reserved;
    };
    let asked = fields.iter().map(|(of, field, _)| match *field {
        "" => format!("printf(\"%zu\\n\", sizeof({of}));\n"),
        field => format!("printf(\"%zu\\n\", offsetof({of}, {field}));\n"),
    });
    let begin = "#include \"syncguard.h\"\n#include <stdio.h>\nint main(void) {\n".to_owned();
    let text: String = [begin].into_iter().chain(asked).chain(["return 0; }\n".to_owned()]).collect();
    let dir = scratch("fields");
    let (file, program) = (dir.join("fields.c"), dir.join("fields"));
    fs::write(&file, text).expect("it can be written");
    compile("cc", &["-std=c99"], &file, &program);
    let said = Command::new(&program).output().expect("it runs").stdout;
    let said: Vec<usize> =
        String::from_utf8_lossy(&said).lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(said, fields.iter().map(|(_, _, place)| *place).collect::<Vec<_>>(), "{fields:?}");
    fs::remove_dir_all(dir).expect("it can be removed");
}

#[test]
fn the_version_is_the_same_on_both_sides() {
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(string(syncguard_version()), version);
    assert!(HEADER.contains(&format!("#define SYNCGUARD_VERSION \"{version}\"\n")));
    for (name, part) in ["MAJOR", "MINOR", "PATCH"].iter().zip(version.split('.')) {
        assert!(HEADER.contains(&format!("#define SYNCGUARD_VERSION_{name} {part}\n")), "{name}");
    }
}

#[test]
fn null_is_answered_and_never_followed() {
    let key = CString::new("key").expect("no zero byte in it");
    let key = key.as_ptr();
    let mut guard: *mut syncguard_guard = dangling_mut();
    let mut client: *mut syncguard_client = dangling_mut();
    let mut sql: *mut c_char = dangling_mut();
    let mut token: *mut syncguard_token = dangling_mut();
    let mut count = 7;
    // SAFETY: NULL is allowed everywhere, and what is not NULL is valid.
    let answers = unsafe {
        [
            syncguard_client_connect(null(), null(), &raw mut client),
            syncguard_client_connect(key, null(), null_mut()),
            syncguard_client_connect_with(null(), null(), &raw mut client),
            syncguard_client_close(null(), 1),
            syncguard_try_lock(null(), null(), 0, null_mut()),
            syncguard_lock_with(null(), key, null(), &raw mut guard),
            syncguard_try_lock_with(null(), key, null(), &raw mut guard),
            syncguard_read_lock(null(), key, null(), &raw mut guard),
            syncguard_try_read_lock(null(), key, null(), &raw mut guard),
            syncguard_lock_all(null(), null(), 0, null(), &raw mut guard),
            syncguard_try_lock_all(null(), null(), 1, null(), &raw mut guard),
            syncguard_acquire_permit(null(), key, 1, null(), &raw mut guard),
            syncguard_try_acquire_permit(null(), key, 1, null(), &raw mut guard),
            syncguard_permits_in_use(null(), key, &raw mut count),
            syncguard_elect(null(), key, null(), None, null_mut()),
            syncguard_leader(null(), key, null_mut(), null_mut(), null_mut()),
            syncguard_run_once(null(), key, SYNCGUARD_NUMBER, 1, null(), None, null_mut()),
            syncguard_guard_wait_lost(null(), 1),
            syncguard_guard_on_lost(null(), None, null_mut()),
            syncguard_guard_extend(null(), 1),
            syncguard_guard_fence_sql(null(), &raw mut sql),
            syncguard_guard_release(null()),
            syncguard_guard_release_now(null()),
            syncguard_term_wait_lost(null(), 1),
            syncguard_term_fence_sql(null(), &raw mut sql),
            syncguard_run_wait_lost(null(), 1),
            syncguard_run_completion_sql(null(), &raw mut sql),
            syncguard_token_new(null_mut()),
            syncguard_token_child(null(), &raw mut token),
            syncguard_token_cancel(null()),
            syncguard_lock(null(), key, 0, 0, &raw mut guard),
        ]
    };
    assert_eq!(answers, [SYNCGUARD_INVALID_ARGUMENT; 31]);
    let cleared = guard.is_null() && client.is_null() && sql.is_null() && token.is_null() && count == 0;
    assert!(cleared, "out parameters are cleared");
    assert_eq!(string(syncguard_last_error()), "client is NULL");
    // SAFETY: NULL is allowed everywhere.
    unsafe {
        assert_eq!((syncguard_guard_fence(null()), syncguard_guard_fence_of(null(), null())), (0, 0));
        assert_eq!((syncguard_guard_is_held(null()), syncguard_guard_permit(null())), (0, 0));
        assert_eq!((syncguard_guard_remaining_ms(null()), syncguard_guard_is_shared(null())), (0, 0));
        assert_eq!((syncguard_term_number(null()), syncguard_term_remaining_ms(null())), (0, 0));
        assert_eq!((syncguard_run_slot(null()), syncguard_run_skipped(null())), (0, 0));
        assert_eq!((syncguard_run_period_start_ms(null()), syncguard_run_remaining_ms(null())), (0, 0));
        assert_eq!((syncguard_run_fence(null()), syncguard_run_is_held(null())), (0, 0));
        assert_eq!((syncguard_term_is_held(null()), syncguard_token_is_cancelled(null())), (0, 0));
        syncguard_guard_free(null_mut());
        syncguard_client_free(null_mut());
        syncguard_token_free(null_mut());
        syncguard_text_free(null_mut());
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

/// The literals with a space in them, outside of tests and comments.
fn texts_of(file: &Path, found: &mut Vec<String>) {
    let text = fs::read_to_string(file).expect("it can be read");
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    for line in code.lines().map(str::trim).filter(|line| !line.starts_with(['/', '#'])) {
        found.extend(line.split('"').skip(1).step_by(2).filter(|text| text.contains(' ')).map(str::to_owned));
    }
}

fn texts_below(dir: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).expect("the sources are there") {
        let path = entry.expect("it can be read").path();
        // What an operator finds, whom C has not.
        if path.file_stem().is_some_and(|name| name.to_string_lossy().starts_with("check")) {
            continue;
        }
        if path.is_dir() { texts_below(&path, found) } else { texts_of(&path, found) }
    }
}

#[test]
fn no_text_advises_what_only_rust_has() {
    let (src, mut texts) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("../src"), Vec::new());
    for part in ["lock", "leases", "pg", "client", "model", "backend"] {
        texts_below(&src.join(part), &mut texts);
    }
    texts_of(&src.join("error.rs"), &mut texts);
    assert!(texts.len() > 200, "{}", texts.len());
    let only_rust =
        ["builder", "()", "::", "connect_with", "complete_in", "claim_at_start", "spawn_blocking"];
    // Of a caller's own pool and of session locks, which C has not; SQL, and code between two literals.
    let not_told = [
        "a max_size of at least 2",
        "advisory_holders",
        "SELECT",
        "pg_catalog",
        "{GT}",
        "session lock",
        "|i, piece|",
        "enumerate()",
        "undistribute_table()",
    ];
    let wrong: Vec<_> = texts
        .iter()
        .filter(|text| !not_told.iter().any(|part| text.contains(part)))
        .map(|text| in_c(text))
        .filter(|text| {
            only_rust.iter().any(|part| text.replace("syncguard_client_connect_with", "").contains(part))
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_shared_library_exports_what_the_header_declares_and_nothing_else() {
    // Built beside this test, or by it.
    let test = env::current_exe().expect("a program knows its file");
    let dir = test.parent().and_then(Path::parent).expect("tests are built into PROFILE/deps");
    let profile = if dir.ends_with("debug") { "dev" } else { "release" };
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "-p", "syncguard-ffi", "--lib", "--profile", profile, "--target-dir"])
        .arg(dir.parent().expect("a profile is in a target directory"))
        .status();
    assert!(built.is_ok_and(|status| status.success()), "the C interface builds");
    let output = Command::new("nm")
        .args(["-D", "--defined-only", "--format=posix"])
        .arg(dir.join("libsyncguard_ffi.so"))
        .output()
        .expect("nm is installed, with the compiler");
    let said = String::from_utf8_lossy(&output.stdout);
    let exported: BTreeSet<&str> = said.lines().filter_map(|line| line.split(' ').next()).collect();
    let declared = functions_of_the_header();
    let declared: BTreeSet<&str> = declared
        .iter()
        .filter_map(|function| function.split('(').next()?.rsplit([' ', '*']).next())
        .collect();
    assert_eq!(exported, declared);
}
