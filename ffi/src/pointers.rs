//! Pointers from C: texts, handles, out parameters.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use syncguard::LockError;

use crate::errors::{invalid, quiet};

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncguard_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it came from `give_text`, and is freed once, by the header's rules.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// # Safety
/// NULL or text that ends with a zero byte and stays as it is during the call.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str, LockError> {
    // SAFETY: what the caller promises.
    unsafe { optional_text(pointer, name) }?.ok_or_else(|| invalid(format!("{name} is NULL")))
}

/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional_text<'a>(
    pointer: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, LockError> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and what the caller promises.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| invalid(format!("{name} is not UTF-8")))
}

/// # Safety
/// NULL, or `count` pointers for each of which [`text`] may be called.
pub(crate) unsafe fn texts<'a>(
    pointers: *const *const c_char,
    count: usize,
    name: &str,
) -> Result<Vec<&'a str>, LockError> {
    // More than the library takes, and fewer than address space could hold.
    const MOST: usize = 65_536;
    if count == 0 {
        return Ok(Vec::new());
    }
    if pointers.is_null() {
        return Err(invalid(format!("{name} is NULL")));
    }
    if count > MOST {
        return Err(invalid(format!("count is {count}: is it the number of {name}?")));
    }
    // SAFETY: not NULL, and what the caller promises.
    let pointers = unsafe { std::slice::from_raw_parts(pointers, count) };
    let named = |(at, pointer): (usize, &*const c_char)| {
        // SAFETY: what the caller promises.
        unsafe { text(*pointer, &format!("{name}[{at}]")) }
    };
    pointers.iter().enumerate().map(named).collect()
}

/// # Safety
/// NULL or a handle that nobody frees during the call.
pub(crate) unsafe fn borrow<'a, T>(handle: *const T, name: &str) -> Result<&'a T, LockError> {
    // SAFETY: what the caller promises; handles are only borrowed shared.
    unsafe { handle.as_ref() }.ok_or_else(|| invalid(format!("{name} is NULL")))
}

/// # Safety
/// NULL or a variable that may be written.
pub(crate) unsafe fn clear<T>(out: *mut *mut T) -> Result<(), LockError> {
    if out.is_null() {
        return Err(invalid("out is NULL"));
    }
    // SAFETY: not NULL, and what the caller promises.
    unsafe { out.write(ptr::null_mut()) };
    Ok(())
}

/// # Safety
/// A variable that may be written.
pub(crate) unsafe fn give<T>(out: *mut *mut T, value: T) {
    // SAFETY: what the caller promises.
    unsafe { out.write(Box::into_raw(Box::new(value))) };
}

/// # Safety
/// A variable that may be written.
pub(crate) unsafe fn give_text(out: *mut *mut c_char, text: String) -> Result<(), LockError> {
    let text = CString::new(text).map_err(|_| invalid("the text has a zero byte in it"))?;
    // SAFETY: what the caller promises.
    unsafe { out.write(text.into_raw()) };
    Ok(())
}

/// # Safety
/// NULL, or a variable that may be written.
pub(crate) unsafe fn tell<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not NULL, and what the caller promises.
        unsafe { out.write(value) };
    }
}

/// # Safety
/// NULL, or a handle of `give` that nobody uses any more.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    if handle.is_null() {
        return;
    }
    // SAFETY: it came from `Box::into_raw`, and is freed once, as the caller promises.
    let value = unsafe { Box::from_raw(handle) };
    quiet((), || drop(value));
}
