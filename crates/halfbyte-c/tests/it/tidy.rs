//! Where pointers of callers become references: in few files, which look at them from all sides.

use std::path::Path;

/// What takes a caller's word for it, and the files that may.
const RAW: [(&str, &[&str]); 5] = [
    ("from_raw_parts", &["tensor.rs", "model.rs"]),
    ("View::from_raw", &["tensor.rs"]),
    ("ViewMut::from_raw", &["tensor.rs"]),
    ("Stream::from_raw", &["device.rs"]),
    ("CStr::from_ptr", &["text.rs", "status.rs"]),
];

#[test]
fn pointers_of_callers_are_followed_in_few_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for entry in std::fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for (raw, files) in RAW {
            let follows = text.contains(raw) && text.contains("unsafe {");
            assert!(!follows || files.contains(&name), "{name} has {raw}");
        }
        // What C calls goes through the boundary.
        for function in text.split("pub extern \"C\" fn ").skip(1) {
            let body = function.split("\n}\n").next().unwrap();
            let infallible = !body.contains("-> halfbyte_status {") && !body.contains("Option<Box<");
            assert!(infallible || body.contains("guard(|| ") || body.contains("guard_quietly("), "{name}: {body}");
            seen += 1;
        }
    }
    assert!(seen > 40, "found only {seen} functions");
}
