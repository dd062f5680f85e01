"""A tiny recipe of its own package: the command line, the checker and the launcher are tested on it through --trust-
package.
"""
