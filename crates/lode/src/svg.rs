//! Pictures as SVG: the page, and text on it. What is drawn is each picture's own.

use std::fmt::Write;

/// A white page of this size, with a picture's own styles and patterns. Whoever draws on it closes it with `</svg>`.
pub fn page(svg: &mut String, (width, height): (f64, f64), styles: &str, patterns: &str) {
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0}" width="{width}" height="{height:.0}" font-family="DejaVu Sans, Verdana, sans-serif">
<style>
{styles}</style>
<defs>
{patterns}</defs>
<rect width="100%" height="100%" fill="#ffffff"/>
"##
    );
}

pub fn text(svg: &mut String, x: f64, y: f64, anchor: &str, class: &str, what: &str) {
    let what = escape(what);
    let _ =
        writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{what}</text>"#);
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
